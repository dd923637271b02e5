"""Blending: which store gives each sample, by weight, exact to one sample and without chance."""

from __future__ import annotations

from fractions import Fraction
from functools import reduce
from math import lcm

import numpy as np
from numpy.typing import NDArray

FINEST = 100_000
"""Samples after which a blend has given every store its exact share; finer weights are rounded to parts of this many."""


class Blend:
    """Always the store that is furthest behind its share, the first of equals: Megatron's rule, in whole numbers.

    The rule repeats itself: after `period` samples every store has had its share exactly. The first period alone differs,
    because the very first sample goes to the heaviest store; so two periods in memory answer for any sample.
    """

    def __init__(self, weights: list[float]) -> None:
        parts = _whole(weights)
        self.period = sum(parts)
        draws = np.empty(2 * self.period, np.int64)
        self.draws, self.parts = draws, np.array(parts, np.int64)
        behind = self.parts.copy()  # how far each is behind its share, in parts of a sample
        for sample in range(len(draws)):
            if sample > 1:
                behind += self.parts
            draws[sample] = chosen = int(behind.argmax())
            behind[chosen] -= self.period
        self.before = np.empty(len(draws), np.int64)
        for store in range(len(parts)):
            mine = np.flatnonzero(draws == store)
            self.before[mine] = np.arange(len(mine))

    def drawn(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(which store, the number of the sample within it) for each sample."""
        rounds = np.maximum(samples // self.period - 1, 0)
        places = samples - rounds * self.period
        stores = self.draws[places]
        return stores, self.before[places] + rounds * self.parts[stores]


def _whole(weights: list[float]) -> list[int]:
    """Weights as whole numbers without a common factor, as they are written: 0.3 is three tenths."""
    shares = [Fraction(str(weight)) for weight in weights]
    total = sum(shares)
    shares = [share / total for share in shares]
    common = reduce(lcm, (share.denominator for share in shares))
    if common <= FINEST:
        return [int(share * common) for share in shares]
    parts = [max(1, int(share * FINEST)) for share in shares]
    behind = sorted(range(len(parts)), key=lambda place: parts[place] - shares[place] * FINEST)
    for place in behind[: max(0, FINEST - sum(parts))]:
        parts[place] += 1
    return parts
