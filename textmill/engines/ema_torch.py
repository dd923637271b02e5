"""`train.ema_window` in torch: an exponential moving average of the trained weights, which is evaluated and saved."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

RAW = "raw"
"""The kind under which a checkpoint's optimizer state has the weights that training continues with."""


class Average:
    """The average of this rank's part of each trained weight, in fp32; updated on the device, without waiting for
    it."""

    def __init__(self, own: dict[nn.Parameter, nn.Parameter], window: float | None) -> None:
        """`own` is this rank's part of each trained parameter; `window` is in steps, None: nothing is averaged."""
        self.own, self.decay = ({}, 0.0) if window is None else (own, 1 - 1 / max(1.0, window))
        self.raw: list[Tensor] = [part.detach() for part in self.own.values()]
        self.tensors = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in self.raw]
        self._in_net = False

    @torch.no_grad()
    def reset(self) -> None:
        """Start from the net's weights."""
        self._in_net = False
        if self.tensors:
            torch._foreach_copy_(self.tensors, self.raw)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the weights after step `step`, counted from 0.

        The bias is corrected: after n steps, weights that are k steps old have decay^k / (sum of all decay^i, i < n).
        """
        if not self.tensors:
            return
        corrected = -math.expm1((step + 1) * math.log(self.decay)) if self.decay else 1.0
        torch._foreach_lerp_(self.tensors, self.raw, min(1.0, (1 - self.decay) / corrected))

    @torch.no_grad()
    def put_in_net(self, averaged: bool) -> None:
        """Make the net compute with the averaged or with the raw weights; the other ones are kept aside."""
        if averaged == self._in_net:
            return
        for part, other in zip(self.raw, self.tensors, strict=True):
            aside = part.clone()
            part.copy_(other)
            other.copy_(aside)
        self._in_net = averaged

    def weights(self, *, raw: bool = False) -> dict[nn.Parameter, Tensor]:
        """The averaged or the raw weights of each trained parameter of the net."""
        return dict(zip(self.own, self.raw if raw != self._in_net else self.tensors, strict=True))

    @torch.no_grad()
    def load_raw(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set the raw weights of a parameter; `values` is this rank's part."""
        self.weights(raw=True)[parameter].copy_(values)
