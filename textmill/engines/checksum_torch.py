"""Checksums of weights, to compare replicas; and a bit flip, to test that comparison."""

from __future__ import annotations

import torch
from torch import Tensor


def checksum_tensors(tensors: dict[str, Tensor]) -> dict[str, int]:
    """The sum of each tensor's bits as integers: any single flipped bit changes it. Waits for the device once."""
    sums = [tensor.detach().contiguous().view(torch.int32).sum(dtype=torch.int64) for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack(sums).tolist(), strict=True))


def flip_bit(tensor: Tensor) -> None:
    """Flip a bit of the first element, as faulty memory would."""
    tensor.detach().view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 12)
