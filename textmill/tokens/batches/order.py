"""Random orders by arithmetic."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from textmill.counters import keys_of


def order_of(count: int, *numbers: int) -> NDArray[np.int64]:
    """A permutation of range(count): the places sorted by a hash of (numbers, place)."""
    return np.argsort(keys_of(np.arange(count, dtype=np.int64), *numbers), kind="stable")
