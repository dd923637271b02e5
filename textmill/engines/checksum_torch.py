"""The bits of weights: summed to compare copies, flipped to try that."""

from __future__ import annotations

import torch
from torch import Tensor


def bit_sums(tensors: dict[str, Tensor]) -> dict[str, int]:
    """The bits of each tensor read as integers and summed, so that no single one can flip unseen; one wait for the device."""
    sums = [tensor.detach().contiguous().view(torch.int32).sum(dtype=torch.int64) for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(sums).tolist(), strict=True))


def flip_a_bit(tensor: Tensor) -> None:
    """Change a weight as a faulty memory would."""
    tensor.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 12)
