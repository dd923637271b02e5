"""What decides the samples of a run, per step range: batch sizes and blend may be changed in mid-run."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from textmill.tokens.batches.batch_sizes import BatchSizes
from textmill.tokens.batches.blend import Blend

Source = tuple[str, float]
"""A token store of a blend: its fingerprint and its weight."""


@dataclass(frozen=True)
class DataRange:
    """The settings of the samples from a step on, up to the next range."""

    step: int
    batch: int
    batch_rampup: Sequence[int]
    sources: Sequence[Source]


@dataclass(frozen=True)
class BlendRange:
    """Consecutive samples with the same blend."""

    sample: int
    """The first one."""
    blend: Blend
    layouts: list[int | None]
    """The number of the open layout of each store of the blend; None: a store that is no longer used."""
    taken: list[int]
    """How many samples each store gave before: it goes on with the next one."""


def sizes_of(ranges: Sequence[DataRange]) -> BatchSizes:
    """The batch sizes of all ranges."""
    sizes = BatchSizes(ranges[0].batch, ranges[0].batch_rampup)
    for before, one in itertools.pairwise(ranges):
        if (one.batch, list(one.batch_rampup)) != (before.batch, list(before.batch_rampup)):
            sizes = sizes.changed(one.step, one.batch, one.batch_rampup)
    return sizes


def blends_of(ranges: Sequence[DataRange], sizes: BatchSizes) -> list[BlendRange]:
    """The blends of all ranges; the layouts are numbered by the stores of the last range."""
    opened = {store: number for number, store in enumerate(_stores_of(ranges[-1]))}
    taken: Counter[tuple[str, int]] = Counter()
    found: list[BlendRange] = []
    for number, one in enumerate(ranges):
        if number and list(one.sources) == list(ranges[number - 1].sources):
            continue
        start = sizes.samples_before(one.step)
        stores, blend = _stores_of(one), Blend([weight for _, weight in one.sources])
        found.append(
            BlendRange(start, blend, [opened.get(store) for store in stores], [taken[store] for store in stores])
        )
        later = [other.step for other in ranges[number + 1 :] if list(other.sources) != list(one.sources)]
        if later:
            counts = blend.counts_before(sizes.samples_before(later[0]) - start)
            taken.update(dict(zip(stores, counts.tolist(), strict=True)))
    return found


def _stores_of(one: DataRange) -> list[tuple[str, int]]:
    """A key for each store: its fingerprint, and its number among those with the same fingerprint."""
    seen: Counter[str] = Counter()
    keys = []
    for fingerprint, _ in one.sources:
        keys.append((fingerprint, seen[fingerprint]))
        seen[fingerprint] += 1
    return keys
