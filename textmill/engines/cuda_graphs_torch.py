"""Forward and backward as one recorded CUDA graph: the same kernels without the gaps between their launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from textmill.kernels.graph_capture_torch import capturing

MOST = 4
"""Shapes that are recorded; what comes in yet another is run without a recording."""


@dataclass(frozen=True)
class Recording:
    """A graph, the tensors it reads, and those it leaves its results in."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor | None]
    loss: Tensor
    gradients: list[Tensor]


class Recorded:
    """A pass over a micro-batch that adds to the parameters' gradients and returns its loss, recorded at its first call for each shape."""

    def __init__(self, work: Callable[..., Tensor], parameters: list[nn.Parameter]) -> None:
        self.work, self.parameters = work, parameters
        self.recordings: dict[tuple[object, ...], Recording] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, *given: Tensor | None) -> Tensor:
        """The loss, valid until the next call; the gradients are in the recording's own memory until a second pass adds to them."""
        key = tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in given)
        if key not in self.recordings:
            if len(self.recordings) == MOST:
                return self.work(*given)
            held = [parameter.grad for parameter in self.parameters]
            self.recordings[key] = self._record(given)
            self._hand(held)
        recording = self.recordings[key]
        for kept, new in zip(recording.inputs, given, strict=True):
            if kept is not None and new is not None:
                kept.copy_(new, non_blocking=True)
        before = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if before and any(before[0] is one.gradients[0] for one in self.recordings.values()):
            before = [gradient.clone() for gradient in before]
        recording.graph.replay()
        if before:
            torch._foreach_add_(before, recording.gradients)
        self._hand(before or recording.gradients)
        return recording.loss

    def _hand(self, gradients: Sequence[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _record(self, given: tuple[Tensor | None, ...]) -> Recording:
        inputs = [None if tensor is None else tensor.clone() for tensor in given]
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):  # compiles, and lets libraries choose their kernels
                self._hand([None] * len(self.parameters))
                self.work(*inputs)
        torch.cuda.current_stream().wait_stream(aside)
        self._hand([None] * len(self.parameters))
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self.pool):
            loss = self.work(*inputs)
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return Recording(graph, inputs, loss, gradients)
