"""The dynamic loss scale of fp16, updated on the device, so that no step waits to know whether it overflowed."""

from __future__ import annotations

import torch
from torch import Tensor

FIRST = 2.0**32
LOWEST = 1.0
WINDOW = 1000
"""Steps in a row without an overflow after which the scale doubles."""
HYSTERESIS = 2
"""Overflows since the last doubling after which each further one halves the scale."""


class LossScaler:
    """Megatron's dynamic loss scaler."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(FIRST, device=device)
        self.good, self.left = torch.tensor(0, device=device), torch.tensor(HYSTERESIS, device=device)

    def update(self, finite: Tensor) -> None:
        """After a step: double the scale after a window without overflows, halve it after too many of them."""
        good = torch.where(finite, self.good + 1, 0)
        left = torch.where(finite, self.left, self.left - 1)
        grows = good == WINDOW
        shrinks = ~finite & (left <= 0)
        self.scale = torch.where(
            grows, self.scale * 2, torch.where(shrinks, (self.scale / 2).clamp_min(LOWEST), self.scale)
        )
        self.good, self.left = torch.where(grows, 0, good), torch.where(grows, HYSTERESIS, left)

    def state(self) -> dict[str, float]:
        """The state for a checkpoint: scale, steps since the last overflow, overflows left until it halves."""
        return {"scale": float(self.scale), "good": int(self.good), "left": int(self.left)}

    def load_state(self, state: dict[str, float]) -> None:
        """Resume from a saved state."""
        self.scale = torch.full_like(self.scale, state["scale"])
        self.good, self.left = torch.full_like(self.good, state["good"]), torch.full_like(self.left, state["left"])
