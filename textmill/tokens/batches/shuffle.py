"""Shuffling by arithmetic: the new position of an item is computed, so no permutation is ever held in memory."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from textmill.counters import hash_numbers

ROUNDS = 6


def permute(count: int, positions: NDArray[np.int64], *key: int) -> NDArray[np.int64]:
    """The items at these positions in a random permutation of range(count); the key selects the permutation.

    `permute(5, np.arange(5), seed)` has each of 0 to 4 once; `permute(5, np.array([2]), seed)` is its third number.
    """
    bits = max(1, (count - 1).bit_length())
    keys = _round_keys(*key)
    items = _mix(positions.astype(np.uint64), bits, keys)
    # _mix permutes a power of two (cycle walking): a result outside the range is mixed again until it is inside.
    outside = np.flatnonzero(items >= count)
    while len(outside):
        items[outside] = _mix(items[outside], bits, keys)
        outside = outside[items[outside] >= count]
    return items.astype(np.int64)


def shuffle_in_epoch(samples: NDArray[np.int64], count: int, seed: int | None, *key: int) -> NDArray[np.int64]:
    """The item of each sample in its epoch of `count` items; each epoch has its own order. No seed: not shuffled."""
    positions = samples % count
    epochs = samples // count
    if seed is not None:
        for epoch in np.unique(epochs).tolist():
            rows = epochs == epoch
            positions[rows] = permute(count, positions[rows], seed, *key, epoch)
    return positions


@lru_cache(maxsize=64)
def _round_keys(*key: int) -> list[int]:
    return [hash_numbers(*key, number) for number in range(ROUNDS)]


def _mix(values: NDArray[np.uint64], bits: int, keys: list[int]) -> NDArray[np.uint64]:
    """A bijection on numbers of `bits` bits: each round multiplies by an odd number, adds, and XORs the high half."""
    mask = np.uint64((1 << bits) - 1)
    half = np.uint64((bits + 1) // 2)
    for key in keys:
        values = values * np.uint64(key | 1)
        values += np.uint64(key >> 7)
        values &= mask
        values ^= values >> half
    return values
