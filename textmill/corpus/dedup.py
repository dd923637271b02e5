"""Exact duplicates over all shards: the first in canonical order stays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def keep_masks(digests: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.bool_]]:
    """For each shard's rows of 16 bytes, which ones were not seen before, in this shard or an earlier one."""
    if not digests:
        return []
    halves = np.ascontiguousarray(np.concatenate(digests)).view(np.uint64)
    high, low = halves[:, 0], halves[:, 1]
    order = np.lexsort((low, high))  # stable: among equals the first in canonical order comes first
    high, low = high[order], low[order]
    keep = np.ones(len(order), dtype=np.bool_)
    keep[order[1:][(high[1:] == high[:-1]) & (low[1:] == low[:-1])]] = False
    return np.split(keep, np.cumsum([len(shard) for shard in digests])[:-1])
