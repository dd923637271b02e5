"""Random orders by arithmetic: where a place goes is computed, so that no order is ever held in memory."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from textmill.counters import hash_numbers

ROUNDS = 6


def shuffled(count: int, places: NDArray[np.int64], *numbers: int) -> NDArray[np.int64]:
    """Where each of `places` goes in a permutation of range(count) that the numbers name."""
    bits = max(1, (count - 1).bit_length())
    keys = _keys(*numbers)
    found = _scattered(places.astype(np.uint64), bits, keys)
    # The scattering permutes a power of two; a place outside the count walks on until it is inside again.
    outside = np.flatnonzero(found >= count)
    while len(outside):
        found[outside] = _scattered(found[outside], bits, keys)
        outside = outside[found[outside] >= count]
    return found.astype(np.int64)


def placed(samples: NDArray[np.int64], count: int, seed: int | None, *numbers: int) -> NDArray[np.int64]:
    """Where samples stand in an epoch of `count`: each epoch has an order of its own; without a seed, as they are."""
    places, epochs = samples % count, samples // count
    if seed is not None:
        for epoch in np.unique(epochs).tolist():
            mine = epochs == epoch
            places[mine] = shuffled(count, places[mine], seed, *numbers, epoch)
    return places


@lru_cache(maxsize=64)
def _keys(*numbers: int) -> list[int]:
    return [hash_numbers(*numbers, number) for number in range(ROUNDS)]


def _scattered(values: NDArray[np.uint64], bits: int, keys: list[int]) -> NDArray[np.uint64]:
    """A bijection of numbers of so many bits: each round multiplies by an odd number, adds, and folds the high half down."""
    mask, half = np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2)
    for key in keys:
        values = values * np.uint64(key | 1)
        values += np.uint64(key >> 7)
        values &= mask
        values ^= values >> half
    return values
