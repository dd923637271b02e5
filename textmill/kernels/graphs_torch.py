"""CUDA graphs: many kernels launched as one, where the launches would take longer than the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

MAX_GRAPHS = 40
"""Each graph has activations of its own shapes; other shapes are computed as usual."""


class GraphedFunction:
    """A function of tensors on a GPU that is launched as a CUDA graph.

    The first call with tensors of some shapes runs as usual: it compiles kernels, and allocates what the function
    keeps. The second is captured. The result of a replay is overwritten by the next one.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[tuple[Any, ...], tuple[Any, list[Tensor], Tensor] | None] = {}
        """By the shapes of the arguments: the graph, the tensors that it reads, and its result; None: not captured."""
        self.max_graphs = MAX_GRAPHS
        """0 after a capture that failed."""

    def __call__(self, *tensors: Tensor | None) -> Tensor:
        """The function's result."""
        given = [tensor for tensor in tensors if tensor is not None]
        shapes = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors)
        if shapes not in self.graphs:
            self.graphs[shapes] = None
        elif self.graphs[shapes] is None and len(self.graphs) <= self.max_graphs:
            self._capture(shapes, tensors)
        captured = self.graphs[shapes]
        if captured is None:
            return self.function(*tensors)
        graph, inputs, result = captured
        if inputs:
            torch._foreach_copy_(inputs, given)
        graph.replay()
        return result

    def _capture(self, shapes: tuple[Any, ...], tensors: tuple[Tensor | None, ...]) -> None:
        inputs = [None if tensor is None else tensor.clone() for tensor in tensors]
        graph = torch.cuda.CUDAGraph()
        try:
            with capture_graph(graph, self.pool):
                result = self.function(*inputs)
        except RuntimeError:  # something in it cannot be captured; nothing was computed
            self.max_graphs = 0
        else:
            self.graphs[shapes] = graph, [one for one in inputs if one is not None], result


@cache
def _capture_stream(device: int) -> Any:
    """The stream of all captures on a device: memory of a pool is used again only by graphs of the same stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def capture_graph(graph: Any, pool: Any) -> Iterator[None]:
    """Capture everything done inside the `with` block into `graph`; other threads may use the GPU meanwhile.

    `torch.cuda.graph` would also free all pinned host memory, which the next checkpoint would have to wait for. The
    cuBLAS workspaces are cleared before and after, so that cuBLAS allocates its workspace from the graph's own
    memory pool. Otherwise torch's compiler, which frees all workspaces now and then, would leave the graph with
    freed memory.
    """
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a capture cannot free memory itself
    with torch.cuda.stream(_capture_stream(torch.cuda.current_device())):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()
    torch._C._cuda_clearCublasWorkspaces()
