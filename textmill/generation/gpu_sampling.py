"""Draws that ask for temperature and top_k alone, as most do: what kernels need to know of them. Shapes: N texts, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from textmill.config import SampleConfig
from textmill.kernels.transfer_torch import on_device

NEVER = -math.inf
COLDEST = 1e-30
"""Below this a temperature is no longer a number in single precision; the likeliest token is certain long before."""


@dataclass(frozen=True)
class Draw:
    """A draw that asks for no other rules than temperature and top_k."""

    temperatures_N: Tensor
    k_N1: Tensor | None
    """The likeliest that have a part, 0 for all; None, if no row asks."""
    most: int

    def kth(self, scores_NV: Tensor, barred_NK: Tensor | None) -> Tensor | None:
        """The least score of each row that has a part."""
        if self.k_N1 is None:
            return None
        more = 0 if barred_NK is None else barred_NK.shape[1]
        found = scores_NV.topk(min(self.most + more, scores_NV.shape[1]), dim=1)
        values_NK = found.values.float()
        if barred_NK is not None:
            barred = (found.indices[:, :, None] == barred_NK[:, None]).any(2)
            values_NK = values_NK.masked_fill(barred, NEVER).sort(1, descending=True).values
        kth_N1 = values_NK.gather(1, (self.k_N1 - 1).clamp(0, values_NK.shape[1] - 1))
        return torch.where(self.k_N1 > 0, kth_N1, NEVER)[:, 0]


def draw_of(samples: Sequence[SampleConfig], device: torch.device) -> Draw:
    """The draw of rows that are all drawn and ask for no more."""
    temperatures, k = [max(sample.temperature, COLDEST) for sample in samples], [sample.top_k for sample in samples]
    k_N1 = on_device(k, device)[:, None] if any(k) else None
    return Draw(on_device(temperatures, device, torch.float32), k_N1, max(k))
