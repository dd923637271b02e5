"""The loss scale of fp16: as high as the gradients bear, moved on the device, so that no step waits to know whether one overflowed."""

from __future__ import annotations

import torch
from torch import Tensor

FIRST = 2.0**32
LOWEST = 1.0
WINDOW = 1000
"""Steps in a row without an overflow after which the scale doubles."""
HYSTERESIS = 2
"""Overflows since the last doubling from which on each one halves the scale."""


class Scaler:
    """Megatron's dynamic scaler."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.tensor(FIRST, device=device)
        self.good, self.left = torch.tensor(0, device=device), torch.tensor(HYSTERESIS, device=device)

    def move(self, finite: Tensor) -> None:
        """After a step: up when all of a window was finite, down when the overflows are more than are borne."""
        good = torch.where(finite, self.good + 1, 0)
        left = torch.where(finite, self.left, self.left - 1)
        grows, shrinks = good == WINDOW, ~finite & (left <= 0)
        self.scale = torch.where(
            grows, self.scale * 2, torch.where(shrinks, (self.scale / 2).clamp_min(LOWEST), self.scale)
        )
        self.good, self.left = torch.where(grows, 0, good), torch.where(grows, HYSTERESIS, left)

    def state(self) -> dict[str, float]:
        """All that it goes on from."""
        return {"scale": float(self.scale), "good": int(self.good), "left": int(self.left)}

    def take(self, state: dict[str, float]) -> None:
        """Go on from a state."""
        self.scale = torch.full_like(self.scale, state["scale"])
        self.good, self.left = torch.full_like(self.good, state["good"]), torch.full_like(self.left, state["left"])
