"""Ranges of numbers as arrays, for gathering many slices of an array at once; and the common beginning of two texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def expand_ranges(starts: NDArray[np.int64] | int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers of all ranges start, start + 1 ... start + count - 1, with no Python loop over numbers or ranges.

    Starts [0, 5] and counts [2, 3] -> [0 1 5 6 7]; all ranges may share one start.
    """
    numbers_before = np.cumsum(counts) - counts
    numbers = np.repeat(starts - numbers_before, counts)
    numbers += np.arange(len(numbers))
    return numbers


def count_common(first: Sequence[int] | NDArray[np.int64], second: Sequence[int] | NDArray[np.int64]) -> int:
    """How many tokens two texts have in common from their start."""
    length = min(len(first), len(second))
    if not length or first[0] != second[0]:
        return 0
    differs = np.asarray(first[:length]) != np.asarray(second[:length])
    return int(differs.argmax()) if differs.any() else length
