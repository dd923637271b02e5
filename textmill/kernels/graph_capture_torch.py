"""Work recorded as a CUDA graph, in memory of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(graph: Any, pool: Any) -> Iterator[None]:
    """Record what is done meanwhile.

    cuBLAS takes its workspace anew inside, and gives it back after, so that it lies in the graph's own memory: torch's compiler gives back
    all workspaces now and then, and a graph that had been recorded with one of those would work in memory that is another's.
    """
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.graph(graph, pool=pool):
        yield
    torch._C._cuda_clearCublasWorkspaces()
