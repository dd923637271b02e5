"""Sampling with temperature and top_k only, the common case: the inputs of its GPU kernel.

Shapes in names: N texts, V vocabulary, K candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from textmill.config import SampleConfig
from textmill.kernels.transfer_torch import copy_to_device

MASKED = -math.inf
"""The logit of a token that cannot be chosen."""
MIN_TEMPERATURE = 1e-30
"""A smaller temperature underflows in single precision. The most likely token is certain long before."""


@dataclass(frozen=True)
class TopKSampling:
    """The settings of rows that are all sampled with temperature and top_k and no other rule."""

    temperatures_N: Tensor
    k_N1: Tensor | None
    """Each row's top_k, 0 for no limit; None if no row has a limit."""
    largest_k: int

    def kth_logit(self, logits_NV: Tensor, banned_NK: Tensor | None) -> Tensor | None:
        """Return each row's smallest logit that may still be chosen."""
        if self.k_N1 is None:
            return None
        more = 0 if banned_NK is None else banned_NK.shape[1]
        found = logits_NV.topk(min(self.largest_k + more, logits_NV.shape[1]), dim=1)
        values_NK = found.values.float()
        if banned_NK is not None:
            banned = (found.indices[:, :, None] == banned_NK[:, None]).any(2)
            values_NK = values_NK.masked_fill(banned, MASKED).sort(1, descending=True).values
        kth_N1 = values_NK.gather(1, (self.k_N1 - 1).clamp(0, values_NK.shape[1] - 1))
        return torch.where(self.k_N1 > 0, kth_N1, MASKED)[:, 0]


def new_top_k_sampling(samples: Sequence[SampleConfig], device: torch.device) -> TopKSampling:
    """Collect the temperatures and top_k of all rows."""
    temperatures = [max(sample.temperature, MIN_TEMPERATURE) for sample in samples]
    k = [sample.top_k for sample in samples]
    k_N1 = copy_to_device(k, device)[:, None] if any(k) else None
    return TopKSampling(copy_to_device(temperatures, device, torch.float32), k_N1, max(k))
