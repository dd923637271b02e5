"""Dropout as a hash of (seed, step, sample, site, position, channel): the same on any layout and after any resume."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textmill.counters import sample_keys


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


_PRIME = _signed(0x9E3779B1)
_FIRST, _SECOND = _signed(0x85EBCA6B), _signed(0xC2B2AE35)


def dropout_keys(seed: int, step: int, samples: NDArray[np.int64]) -> Tensor:
    """A 32-bit key for each sample of a step."""
    return torch.from_numpy(sample_keys(seed, step, samples).view(np.int32))


def keys_in(keys_N: Tensor | None, layer: int) -> Tensor | None:
    """A block's keys, with which it names its sites as all blocks do: from 1 on, where the net has counted 3 for each block before."""
    return None if keys_N is None else keys_N + _signed(3 * layer * _PRIME % (1 << 32))


def site_in(layer: int, site: int) -> int:
    """What a block calls a site of the net, with its own keys."""
    return site - 3 * layer


def drop(
    x: Tensor, share: float, keys_N: Tensor | None, site: int, part: int = 0, columns: tuple[int, int] = (0, 1)
) -> Tensor:
    """Zero a share of x [samples, ...] and scale up the rest; without keys nothing is dropped.

    Where x is one of several equal parts along its second dimension, `part` says which, so that all of them drop as the whole would;
    along its last dimension `columns` says which and of how many.
    """
    if keys_N is None or share == 0:
        return x
    count = x[0].numel()
    places = torch.arange(part * count, (part + 1) * count, dtype=torch.int32, device=x.device).view(x.shape[1:])
    if columns[1] > 1:
        width = x.shape[-1]
        places = places + (places // width * (columns[1] - 1) + columns[0]) * width
    keys = _mix(keys_N + _signed(site * _PRIME % (1 << 32))).view(-1, *([1] * (x.dim() - 1)))
    # Each key walks the counters with an odd stride of its own, so that no two keys give one pattern, shifted.
    kept = (_mix(places * (keys | 1) + keys) >> 8 & 0xFFFFFF) >= int(share * (1 << 24))
    return x * kept * (1 / (1 - share))


def _mix(x: Tensor) -> Tensor:
    """Murmur3's finaliser on wrapping 32-bit integers; the masks make the right shifts logical."""
    x = (x ^ (x >> 16 & 0xFFFF)) * _FIRST
    x = (x ^ (x >> 13 & 0x7FFFF)) * _SECOND
    return x ^ (x >> 16 & 0xFFFF)
