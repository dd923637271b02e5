"""Random numbers computed from counters: the same on every machine, parallel layout and library version."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64 bits in which every output bit depends on all input bits."""
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def hash_counters(counters: NDArray[np.int64], *numbers: int) -> NDArray[np.uint64]:
    """A 64-bit hash of each counter together with several numbers; their order matters."""
    return mix((counters.astype(np.uint64) + np.uint64(1)) * GOLDEN_RATIO + np.uint64(hash_numbers(*numbers)))


def draw(keys: NDArray[np.uint64], numbers: NDArray[np.int64] | int) -> NDArray[np.uint64]:
    """64 random bits of each key; other numbers give other bits (SplitMix64, with the key as its seed)."""
    return mix(keys + (np.atleast_1d(np.asarray(numbers, np.uint64)) + np.uint64(1)) * GOLDEN_RATIO)


def to_uniform(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform random numbers in [0, 1) from random bits."""
    return (bits >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def sample_keys(seed: int, step: int, samples: NDArray[np.int64]) -> NDArray[np.uint32]:
    """A 32-bit key for each sample of a step, from which its dropout masks are computed."""
    return (hash_counters(samples, seed, step) & np.uint64(0xFFFFFFFF)).astype(np.uint32)


def hash_numbers(*numbers: int) -> int:
    """One 64-bit hash of several numbers; their order matters."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = mix(key * GOLDEN_RATIO + np.uint64(number % (1 << 64)) + GOLDEN_RATIO)
    return int(key[0])


def uniform_from(*numbers: int) -> float:
    """A uniform random number in [0, 1), computed from several numbers."""
    return (hash_numbers(*numbers) >> 11) / (1 << 53)
