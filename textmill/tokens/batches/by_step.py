"""batch_at(step): the samples of a step, from one store or a blend of several, as a pure function of the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.tokens.batches.batch import IGNORED, Batch
from textmill.tokens.batches.batch_sizes import BatchSizes
from textmill.tokens.batches.blend import Blend
from textmill.tokens.batches.history import BlendRange
from textmill.tokens.batches.layout import Layout, SampleArrays
from textmill.tokens.batches.teacher_cache import TeacherCache
from textmill.tokens.store import TokenStore


class Batches:
    """The batches of a run: one layout per store, their weights in the blend, and the batch sizes.

    `stores` are checked before each batch: one that is truncated while it is mapped would kill the process.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        weights: Sequence[float],
        sizes: BatchSizes,
        stores: Sequence[TokenStore] = (),
        blends: Sequence[BlendRange] = (),
    ) -> None:
        """`blends` are those of a run whose blend was changed; default: one of all layouts, by `weights`."""
        self.layouts, self.sizes, self.stores = layouts, sizes, stores
        self.teacher: TeacherCache | None = None
        """Cached predictions of teachers, which are read with each batch."""
        every = list(range(len(layouts)))
        self.blends = blends or [BlendRange(0, Blend(list(weights)), [*every], [0 for _ in every])]

    def batch_at(self, step: int, part: slice = slice(None)) -> Batch:
        """The global batch of a step, or only the samples of it that `part` selects."""
        batch = self.samples_at(self._sample_numbers(step)[part])
        return batch if self.teacher is None else self.teacher.attach(batch)

    def samples_at(self, samples: NDArray[np.int64]) -> Batch:
        """The samples with these numbers, counted from the start of the run."""
        for mapped in self.stores:
            mapped.check_mapped()
        stores, numbers = self._locate(samples)
        found = [(rows, self.layouts[store].build_samples(numbers[rows])) for store, rows in _rows_by_store(stores)]
        if len(found) > 1:
            arrays = _merge(found)
        else:
            arrays = found[0][1] if found else self.layouts[0].build_samples(numbers)
        return _batch_of(arrays, samples)

    def documents_at(self, step: int) -> Iterator[tuple[int, int, int]]:
        """(sample, store, document) for every document in the batch of a step."""
        samples = self._sample_numbers(step)
        stores, numbers = self._locate(samples)
        for store, rows in _rows_by_store(stores):
            found = self.layouts[store].find_documents(numbers[rows])
            for row, document in zip(found.rows.tolist(), found.documents.tolist(), strict=True):
                yield int(samples[rows[row]]), store, document

    def _locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(layout, number of the sample within its store) for each sample of the run."""
        layouts, numbers = np.zeros_like(samples), np.zeros_like(samples)
        starts = [one.sample for one in self.blends]
        ranges = np.searchsorted(starts, samples, side="right") - 1
        for number in np.unique(ranges).tolist():
            rows, one = ranges == number, self.blends[number]
            stores, found = one.blend.locate(samples[rows] - one.sample)
            if any(one.layouts[store] is None for store in np.unique(stores).tolist()):
                raise TextmillError(
                    "the step saw a token store that tokens.use no longer names; add it again to see it"
                )
            layouts[rows] = np.array([-1 if layout is None else layout for layout in one.layouts])[stores]
            numbers[rows] = found + np.array(one.taken, np.int64)[stores]
        return layouts, numbers

    def _sample_numbers(self, step: int) -> NDArray[np.int64]:
        return np.arange(self.sizes.samples_before(step), self.sizes.samples_before(step + 1), dtype=np.int64)


def batches_in_order(layouts: Sequence[Layout], batch: int, stores: Sequence[TokenStore] = ()) -> Iterator[Batch]:
    """Every sample of every layout once, one layout after the other; `stores` are checked before each batch."""
    before = 0
    for layout in layouts:
        for start in range(0, layout.samples_per_epoch, batch):
            for mapped in stores:
                mapped.check_mapped()
            numbers = np.arange(start, min(start + batch, layout.samples_per_epoch), dtype=np.int64)
            arrays = layout.build_samples(numbers)
            yield _batch_of(arrays, before + numbers)
        before += layout.samples_per_epoch


def _batch_of(arrays: SampleArrays, samples: NDArray[np.int64]) -> Batch:
    return Batch(samples=samples, **vars(arrays))


def _rows_by_store(stores: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    for store in np.unique(stores).tolist():
        yield store, np.flatnonzero(stores == store)


def _merge(found: list[tuple[NDArray[np.int64], SampleArrays]]) -> SampleArrays:
    """Put the samples of all stores back into the order of the batch."""
    order = np.argsort(np.concatenate([rows for rows, _ in found]))
    columns = {name: [getattr(arrays, name) for _, arrays in found] for name in SampleArrays.__dataclass_fields__}
    if any(one is not None for one in columns["pair_labels"]):  # other stores have no pairs
        no_pairs = [np.full_like(arrays.labels, IGNORED) for _, arrays in found]
        given = zip(columns["pair_labels"], no_pairs, strict=True)
        columns["pair_labels"] = [none if one is None else one for one, none in given]
    return SampleArrays(
        **{name: np.concatenate(values)[order] for name, values in columns.items() if values[0] is not None}
    )
