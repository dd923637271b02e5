"""CUDA graph capture with a private cuBLAS workspace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capture_graph(graph: Any, pool: Any) -> Iterator[None]:
    """Capture everything done inside the `with` block into `graph`.

    The cuBLAS workspaces are cleared before and after, so that cuBLAS allocates its workspace from the graph's own
    memory pool. Otherwise torch's compiler, which frees all workspaces now and then, would leave the graph with freed
    memory.
    """
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.graph(graph, pool=pool):
        yield
    torch._C._cuda_clearCublasWorkspaces()
