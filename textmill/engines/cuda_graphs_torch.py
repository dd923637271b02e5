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
    """A CUDA graph, the tensors it reads, and the tensors it writes: each replay overwrites the same ones."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor | None]
    loss: Tensor
    gradients: list[Tensor]

    def copy_inputs(self, arguments: Sequence[Tensor | None]) -> None:
        """Copy the arguments of a pass into the tensors that the graph reads."""
        for graph_input, argument in zip(self.inputs, arguments, strict=True):
            if graph_input is not None and argument is not None:
                graph_input.copy_(argument, non_blocking=True)


class GraphedPass:
    """A forward and backward pass over a micro-batch, captured as a CUDA graph at its first call for each shape.

    The pass returns its loss and accumulates the parameters' gradients. A step of two micro-batches of one shape:

    1. The first replay writes the graph's gradients, and `grad` of each parameter becomes the graph's tensor.
    2. The second replay would overwrite them. So they are cloned before, and the graph's new gradients are added to
       the clones, which become `grad`.
    """

    def __init__(self, run_pass: Callable[..., Tensor], parameters: list[nn.Parameter]) -> None:
        self.run_pass = run_pass
        self.parameters = parameters
        self.captured: dict[tuple[object, ...], CapturedPass] = {}
        """By the shapes and types of the arguments."""
        self.pool = torch.cuda.graph_pool_handle()
        self.max_graphs = MAX_GRAPHS
        """0 if the pass cannot be captured: a user's own net may wait for the GPU, or not use a parameter."""

    def __call__(self, *arguments: Tensor | None) -> Tensor:
        """The loss, which is valid until the next call."""
        captured = self._find_or_capture(arguments)
        if captured is None:
            return self.run_pass(*arguments)
        captured.copy_inputs(arguments)
        accumulated = self._accumulated_gradients()
        captured.graph.replay()
        if accumulated:
            torch._foreach_add_(accumulated, captured.gradients)
        self._set_gradients(accumulated or captured.gradients)
        return captured.loss

    def _find_or_capture(self, arguments: tuple[Tensor | None, ...]) -> CapturedPass | None:
        """The graph for arguments of these shapes; None if the pass runs without one."""
        key = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in arguments)
        if key not in self.captured and len(self.captured) < self.max_graphs:
            accumulated = [parameter.grad for parameter in self.parameters]
            captured = self._capture(arguments)
            self._set_gradients(accumulated)
            if captured is None:
                self.max_graphs = 0
            else:
                self.captured[key] = captured
        return self.captured.get(key)

    def _accumulated_gradients(self) -> list[Tensor]:
        """The gradients of earlier micro-batches, cloned if a replay would overwrite them; [] if there are none."""
        accumulated = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if accumulated and any(accumulated[0] is captured.gradients[0] for captured in self.captured.values()):
            return [gradient.clone() for gradient in accumulated]
        return accumulated

    def _set_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _clear_gradients(self) -> None:
        self._set_gradients([None] * len(self.parameters))

    def _capture(self, arguments: tuple[Tensor | None, ...]) -> CapturedPass | None:
        """None if the pass does something that cannot be captured, or leaves a parameter without a gradient."""
        inputs = [None if tensor is None else tensor.clone() for tensor in arguments]
        self._warm_up(inputs)
        if any(parameter.grad is None for parameter in self.parameters):
            return None
        self._clear_gradients()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            with capture_graph(graph, self.pool):
                loss = self.run_pass(*inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a failed capture does not restore the current stream
            if "captur" not in str(error):
                raise
            return None
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return CapturedPass(graph, inputs, loss, gradients)

    def _warm_up(self, inputs: list[Tensor | None]) -> None:
        """Run the pass twice on a stream of its own, so that kernels are compiled and chosen before the capture."""
        side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(2):
                self._clear_gradients()
                self.run_pass(*inputs)
        torch.cuda.current_stream().wait_stream(side_stream)
