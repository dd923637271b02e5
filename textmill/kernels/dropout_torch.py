"""Dropout as a hash of (seed, step, sample, site, position, channel): the same on any mesh and after any resume."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textmill.counters import sample_keys


def _signed(number: int) -> int:
    return number - (1 << 32) if number >= 1 << 31 else number


_PRIME = _signed(0x9E3779B1)
_FIRST = _signed(0x85EBCA6B)
_SECOND = _signed(0xC2B2AE35)


def dropout_keys(seed: int, step: int, samples: NDArray[np.int64]) -> Tensor:
    """A 32-bit key for each sample of a step."""
    return torch.from_numpy(sample_keys(seed, step, samples).view(np.int32))


def block_keys(dropout_keys_N: Tensor | None, layer: int) -> Tensor | None:
    """Keys for one block: with them every block numbers its dropout sites from 1 (there are 3 sites per block)."""
    return None if dropout_keys_N is None else dropout_keys_N + _signed(3 * layer * _PRIME % (1 << 32))


def site_in_block(layer: int, site: int) -> int:
    """A net-wide dropout site as numbered inside its block."""
    return site - 3 * layer


def drop(
    x: Tensor,
    fraction: float,
    dropout_keys_N: Tensor | None,
    site: int,
    part: int = 0,
    columns: tuple[int, int] = (0, 1),
) -> Tensor:
    """Zero a fraction of x [samples, ...] and scale up the rest; no dropout without keys.

    If x is one of several equal slices along its second dimension, `part` is the number of the slice, so that all
    slices together drop what the full tensor would. `columns` is (number, count) of slices along the last dimension.
    """
    if dropout_keys_N is None or fraction == 0:
        return x
    count = x[0].numel()
    counters = torch.arange(part * count, (part + 1) * count, dtype=torch.int32, device=x.device).view(x.shape[1:])
    if columns[1] > 1:
        width = x.shape[-1]
        counters = counters + (counters // width * (columns[1] - 1) + columns[0]) * width
    keys = _mix(dropout_keys_N + _signed(site * _PRIME % (1 << 32))).view(-1, *([1] * (x.dim() - 1)))
    # Each key has its own odd stride, so that two keys never give shifted versions of one pattern.
    keep = (_mix(counters * (keys | 1) + keys) >> 8 & 0xFFFFFF) >= int(fraction * (1 << 24))
    return x * keep * (1 / (1 - fraction))


def _mix(x: Tensor) -> Tensor:
    """Murmur3's finaliser on wrapping 32-bit integers; the masks make the right shifts logical."""
    x = (x ^ (x >> 16 & 0xFFFF)) * _FIRST
    x = (x ^ (x >> 13 & 0x7FFFF)) * _SECOND
    return x ^ (x >> 16 & 0xFFFF)
