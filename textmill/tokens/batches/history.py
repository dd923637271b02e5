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
    """How many samples each store of the blend gave in earlier ranges: it goes on with the next one."""


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


def _store_keys(data_range: DataRange) -> list[tuple[str, int]]:
    """A key for each store: its fingerprint, and its number among those with the same fingerprint."""
    seen: Counter[str] = Counter()
    keys = []
    for fingerprint, _ in data_range.sources:
        keys.append((fingerprint, seen[fingerprint]))
        seen[fingerprint] += 1
    return keys
