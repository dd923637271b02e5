"""Forward and backward as one CUDA graph: the same kernels without the gaps between their launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from textmill.kernels.graph_capture_torch import capture_graph

MAX_GRAPHS = 4
"""Batch shapes that get a graph; passes of further shapes run without one."""


@dataclass(frozen=True)
class CapturedPass:
    """A CUDA graph, the tensors it reads, and the tensors it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor | None]
    loss: Tensor
    gradients: list[Tensor]


class GraphedPass:
    """A forward and backward pass over a micro-batch, captured as a CUDA graph at its first call for each shape.

    The pass returns its loss and accumulates the parameters' gradients.
    """

    def __init__(self, run_pass: Callable[..., Tensor], parameters: list[nn.Parameter]) -> None:
        self.run_pass, self.parameters = run_pass, parameters
        self.captured: dict[tuple[object, ...], CapturedPass] = {}
        self.pool = torch.cuda.graph_pool_handle()
        self.most_graphs = MAX_GRAPHS
        """0 if the pass cannot be captured: a user's own net may wait for the GPU, or not use a parameter."""

    def __call__(self, *arguments: Tensor | None) -> Tensor:
        """The loss, valid until the next call; gradients are in the graph's memory until a second pass adds to them."""
        key = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in arguments)
        if key not in self.captured:
            if len(self.captured) >= self.most_graphs:
                return self.run_pass(*arguments)
            gradients = [parameter.grad for parameter in self.parameters]
            captured = self._capture(arguments)
            self._set_gradients(gradients)
            if captured is None:
                self.most_graphs = 0
                return self.run_pass(*arguments)
            self.captured[key] = captured
        captured = self.captured[key]
        for static, new in zip(captured.inputs, arguments, strict=True):
            if static is not None and new is not None:
                static.copy_(new, non_blocking=True)
        accumulated = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if accumulated and any(accumulated[0] is one.gradients[0] for one in self.captured.values()):
            accumulated = [gradient.clone() for gradient in accumulated]
        captured.graph.replay()
        if accumulated:
            torch._foreach_add_(accumulated, captured.gradients)
        self._set_gradients(accumulated or captured.gradients)
        return captured.loss

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _capture(self, arguments: tuple[Tensor | None, ...]) -> CapturedPass | None:
        """None if the pass does something that cannot be captured, or leaves a parameter without a gradient."""
        inputs = [None if tensor is None else tensor.clone() for tensor in arguments]
        side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(2):  # warm-up: compiles, and lets libraries choose their kernels
                self._set_gradients([None] * len(self.parameters))
                self.run_pass(*inputs)
        torch.cuda.current_stream().wait_stream(side_stream)
        if any(parameter.grad is None for parameter in self.parameters):
            return None
        self._set_gradients([None] * len(self.parameters))
        torch.cuda.empty_cache()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with capture_graph(graph, self.pool):
                loss = self.run_pass(*inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a failed capture leaves its own as the current one
            if "captur" not in str(error):
                raise
            return None
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return CapturedPass(graph, inputs, loss, gradients)
