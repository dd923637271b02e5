"""Blending: which token store each sample comes from, chosen by weight, exactly and without randomness."""

from __future__ import annotations

from fractions import Fraction
from functools import reduce
from math import lcm

import numpy as np
from numpy.typing import NDArray

MAX_PERIOD = 100_000
"""The longest period of a blend, in samples; finer weights are rounded to multiples of 1 / MAX_PERIOD."""


class Blend:
    """Megatron's rule in integers: each sample comes from the store furthest below its weight, the first on a tie.

    Weights 3 and 1 have a period of 4; samples 0 to 7 come from the stores 0 1 0 0 | 0 1 0 0, and sample 5 is sample 1
    of store 1.

    The choices repeat: every `period` samples, each store has given exactly its fraction. Only the first period
    differs, because the very first sample goes to the store with the largest weight. So two periods in memory are
    enough to look up any sample.
    """

    def __init__(self, weights: list[float]) -> None:
        parts = _integer_weights(weights)
        self.period = sum(parts)
        choices = np.empty(2 * self.period, np.int64)
        self.choices, self.integer_weights = choices, np.array(parts, np.int64)
        deficit = self.integer_weights.copy()  # how far each store is below its weight, in units of 1 / period samples
        for sample in range(len(choices)):
            if sample > 1:
                deficit += self.integer_weights
            choices[sample] = chosen = int(deficit.argmax())
            deficit[chosen] -= self.period
        self.index_in_store = np.empty(len(choices), np.int64)
        for store in range(len(parts)):
            samples = np.flatnonzero(choices == store)
            self.index_in_store[samples] = np.arange(len(samples))

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(store, number of the sample within that store) for each sample of the run."""
        periods = np.maximum(samples // self.period - 1, 0)
        positions = samples - periods * self.period
        stores = self.choices[positions]
        return stores, self.index_in_store[positions] + periods * self.integer_weights[stores]

    def counts_before(self, sample: int) -> NDArray[np.int64]:
        """How many of the first `sample` samples each store gives."""
        periods = max(sample // self.period - 1, 0)
        first = self.choices[: sample - periods * self.period]
        return np.bincount(first, minlength=len(self.integer_weights)) + periods * self.integer_weights


def _integer_weights(weights: list[float]) -> list[int]:
    """Weights as integers without a common factor, from their decimal notation: 0.3 is exactly three tenths."""
    fractions = [Fraction(str(weight)) for weight in weights]
    total = sum(fractions)
    fractions = [fraction / total for fraction in fractions]
    common = reduce(lcm, (fraction.denominator for fraction in fractions))
    if common <= MAX_PERIOD:
        return [int(fraction * common) for fraction in fractions]
    parts = [max(1, int(fraction * MAX_PERIOD)) for fraction in fractions]
    most_rounded = sorted(range(len(parts)), key=lambda number: parts[number] - fractions[number] * MAX_PERIOD)
    for number in most_rounded[: max(0, MAX_PERIOD - sum(parts))]:
        parts[number] += 1
    return parts
