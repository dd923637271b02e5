"""batch_at(step): the samples of a step, from one store or a blend of several, as a pure function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from textmill.tokens.batches.batch import Batch
from textmill.tokens.batches.batch_sizes import Sizes
from textmill.tokens.batches.blend import Blend
from textmill.tokens.batches.layout import Layout, Rows


class Batches:
    """Layouts, their weights and the sizes of batches."""

    def __init__(self, layouts: Sequence[Layout], weights: Sequence[float], sizes: Sizes) -> None:
        self.layouts, self.sizes = layouts, sizes
        self.blend = Blend(list(weights))

    def batch_at(self, step: int, part: slice = slice(None)) -> Batch:
        """The global batch of a step, or the samples of it that `part` names."""
        samples = self._samples(step)[part]
        stores, numbers = self.blend.drawn(samples)
        found = [(mine, self.layouts[store].rows(numbers[mine])) for store, mine in _by_store(stores)]
        rows = _joined(found) if len(found) > 1 else found[0][1] if found else self.layouts[0].rows(numbers)
        return Batch(rows.inputs, rows.labels, samples, documents=rows.documents)

    def seen_at(self, step: int) -> Iterator[tuple[int, int, int]]:
        """(sample, store, document) of all that a step sees."""
        samples = self._samples(step)
        stores, numbers = self.blend.drawn(samples)
        for store, mine in _by_store(stores):
            seen = self.layouts[store].seen(numbers[mine])
            for row, document in zip(seen.rows.tolist(), seen.documents.tolist(), strict=True):
                yield int(samples[mine[row]]), store, document

    def _samples(self, step: int) -> NDArray[np.int64]:
        return np.arange(self.sizes.before(step), self.sizes.before(step + 1), dtype=np.int64)


def in_order(layouts: Sequence[Layout], batch: int) -> Iterator[Batch]:
    """Every sample of every layout once, one after the other."""
    before = 0
    for layout in layouts:
        for start in range(0, layout.samples, batch):
            numbers = np.arange(start, min(start + batch, layout.samples), dtype=np.int64)
            rows = layout.rows(numbers)
            yield Batch(rows.inputs, rows.labels, before + numbers, documents=rows.documents)
        before += layout.samples


def _by_store(stores: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    for store in np.unique(stores).tolist():
        yield store, np.flatnonzero(stores == store)


def _joined(found: list[tuple[NDArray[np.int64], Rows]]) -> Rows:
    """The rows of all stores, each in its place in the batch."""
    order = np.argsort(np.concatenate([mine for mine, _ in found]))
    inputs, labels = (
        np.concatenate([getattr(rows, name) for _, rows in found])[order] for name in ("inputs", "labels")
    )
    documents = [rows.documents for _, rows in found if rows.documents is not None]
    return Rows(inputs, labels, np.concatenate(documents)[order] if documents else None)
