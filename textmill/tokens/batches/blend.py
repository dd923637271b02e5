"""Which samples a step has, and which token store each sample comes from; both may be changed in mid-run.

`BatchSizes` says how many samples each step has: constant, growing at the start of a run (Megatron's batch size
ramp-up), or changed in mid-run. `Blend` chooses the stores by weight, exactly and without randomness. A `DataRange` has
the settings of both from a step on.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from math import lcm

import numpy as np
from numpy.typing import NDArray

MAX_PERIOD = 100_000
"""The longest period of a blend, in samples; finer weights are rounded to multiples of 1 / MAX_PERIOD."""

StoreWeight = tuple[str, float]
"""A token store of a blend: its fingerprint and its weight."""


class BatchSizes:
    """The batch size and the first sample of every step, as pure functions of the step."""

    def __init__(self, batch: int, ramp: Sequence[int] = ()) -> None:
        self.phases = _phases(batch, ramp, 0, 0)

    def changed(self, step: int, batch: int, ramp: Sequence[int] = ()) -> BatchSizes:
        """The same sizes before `step`, others from there on; a ramp-up goes on from the samples seen so far."""
        sizes = BatchSizes(batch, ramp)
        sizes.phases = [phase for phase in self.phases if phase.step < step]
        sizes.phases += _phases(batch, ramp, step, self.samples_before(step))
        return sizes

    def size_at(self, step: int) -> int:
        """Samples of a step."""
        return self._phase_of(step).size

    def samples_before(self, step: int) -> int:
        """Samples of all earlier steps, which is also the number of this step's first sample."""
        phase = self._phase_of(step)
        return phase.sample + (step - phase.step) * phase.size

    def full_steps_in(self, samples: int) -> int:
        """How many full steps this many samples are enough for."""
        phase = self.phases[bisect_right(self.phases, samples, key=lambda phase: phase.sample) - 1]
        return phase.step + (samples - phase.sample) // phase.size

    def steps_to_cover(self, samples: int) -> int:
        """How many steps it takes to see all of this many samples."""
        steps = self.full_steps_in(samples)
        return steps + (self.samples_before(steps) < samples)

    def _phase_of(self, step: int) -> SizePhase:
        return self.phases[bisect_right(self.phases, step, key=lambda phase: phase.step) - 1]


@dataclass(frozen=True)
class SizePhase:
    """Consecutive steps with the same batch size, up to the start of the next phase."""

    step: int
    """The first step."""
    sample: int
    """The first sample of that step."""
    size: int
    """Samples per step."""


def _phases(batch: int, ramp: Sequence[int], step: int, sample: int) -> list[SizePhase]:
    """The phases from a step and its first sample on.

    With a ramp-up (start, increment, samples) the batch size after c samples is
    start + increment * floor(c * increases / samples), at most `batch`. A batch of 8 with the ramp-up 2, 2, 24 grows
    three times in 24 samples: 2 from step 0, 4 from step 4 (sample 8), 6 from step 6 (16), 8 from step 8 (28).
    """
    if not ramp:
        return [SizePhase(step, sample, batch)]
    start, increment, ramp_samples = ramp
    all_increases = (batch - start) // increment
    increases = 0
    phases: list[SizePhase] = []
    while increases < all_increases:
        increases = min(all_increases, sample * all_increases // ramp_samples)
        size = start + increases * increment
        phases.append(SizePhase(step, sample, size))
        next_increase = -(-(increases + 1) * ramp_samples // all_increases)  # the sample at which the batch grows
        steps = -(-(next_increase - sample) // size)
        step = step + steps
        sample = sample + steps * size
    return phases


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
        self.choices = choices
        self.integer_weights = np.array(parts, np.int64)
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


@dataclass(frozen=True)
class DataRange:
    """The settings of the samples from a step on, up to the next range."""

    step: int
    batch: int
    batch_rampup: Sequence[int]
    sources: Sequence[StoreWeight]


def sizes_of(ranges: Sequence[DataRange]) -> BatchSizes:
    """The batch sizes of all ranges."""
    sizes = BatchSizes(ranges[0].batch, ranges[0].batch_rampup)
    for before, after in itertools.pairwise(ranges):
        if (after.batch, list(after.batch_rampup)) != (before.batch, list(before.batch_rampup)):
            sizes = sizes.changed(after.step, after.batch, after.batch_rampup)
    return sizes


def blends_of(ranges: Sequence[DataRange], sizes: BatchSizes) -> list[BlendRange]:
    """The blends of all ranges; the layouts are numbered by the stores of the last range.

    A run that saw 100 samples of store a, then 50 of a and 50 of b, then only b: the ranges begin at the samples 0, 100
    and 200, `taken` is [0], [100, 0] and [50]. Only b is open at the end: `layouts` are [None], [None, 0] and [0].
    """
    layout_of_store = {store: number for number, store in enumerate(_store_keys(ranges[-1]))}
    changes = [ranges[0]]
    for before, after in itertools.pairwise(ranges):
        if list(after.sources) != list(before.sources):
            changes.append(after)
    starts = [sizes.samples_before(data_range.step) for data_range in changes]
    taken: Counter[tuple[str, int]] = Counter()
    blends: list[BlendRange] = []
    for number, data_range in enumerate(changes):
        stores = _store_keys(data_range)
        blend = Blend([weight for _, weight in data_range.sources])
        blends.append(
            BlendRange(
                starts[number],
                blend,
                layouts=[layout_of_store.get(store) for store in stores],
                taken=[taken[store] for store in stores],
            )
        )
        if number + 1 < len(changes):
            counts = blend.counts_before(starts[number + 1] - starts[number])
            taken.update(dict(zip(stores, counts.tolist(), strict=True)))
    return blends


@dataclass(frozen=True)
class BlendRange:
    """Consecutive samples with the same blend."""

    sample: int
    """The first one."""
    blend: Blend
    layouts: list[int | None]
    """The number of the open layout of each store of the blend; None: a store that is no longer used."""
    taken: list[int]
    """How many samples each store of the blend gave in earlier ranges: it goes on with the next one."""


def _store_keys(data_range: DataRange) -> list[tuple[str, int]]:
    """A key for each store: its fingerprint, and its number among those with the same fingerprint."""
    seen: Counter[str] = Counter()
    keys = []
    for fingerprint, _ in data_range.sources:
        keys.append((fingerprint, seen[fingerprint]))
        seen[fingerprint] += 1
    return keys
