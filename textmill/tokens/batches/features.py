"""The features layout: rows of one length that are ready to train on, their labels already shifted; a row's place is arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.storage.files import atomic_writer, file_lock, hash_json
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.batches.layout import Rows, Seen, check_ids
from textmill.tokens.batches.prefix_sums import Amounts, running_sums, sums_path
from textmill.tokens.batches.shuffle import placed
from textmill.tokens.features import rows_in
from textmill.tokens.mmap_advice import expect
from textmill.tokens.splits import Features
from textmill.tokens.store import TokenStore
from textmill.tokens.token_tables import IDS, LABELS, Ragged, Table

_ROWS = 4


class FeatureRows:
    """Rows as they are; without a seed in their own order. They are read once, into int32 arrays that every process maps."""

    def __init__(
        self, features: Features, store: TokenStore, *, length: int, seed: int | None, vocab: int | None = None, folder: Path | None = None
    ) -> None:  # fmt: skip
        self.features, self.store, self.length, self.seed, self.vocab, self.folder = (
            features,
            store,
            length,
            seed,
            vocab,
            folder,
        )
        self.samples = features.table.count
        if not self.samples:
            raise TextmillError(
                f"{store.prefix}: there are no rows to learn from; lower tokens.features.min_length, or add text"
            )
        self.cells = opened_cells(features.table, length, folder)
        expect(self.cells, scattered=seed is not None)

    def rows(self, samples: NDArray[np.int64]) -> Rows:
        """The rows of these numbers."""
        cells = np.asarray(self.cells[self._places(samples)])
        inputs, labels = cells[:, 0], cells[:, 1]
        check_ids(inputs.ravel(), self.vocab, self.features.table.files[0].parent)
        check_ids(labels[labels != IGNORED], self.vocab, self.features.table.files[0].parent)
        return Rows(inputs, labels)

    def seen(self, samples: NDArray[np.int64]) -> Seen:
        """The document of each row."""
        places = self._places(samples)
        return Seen(
            np.arange(len(samples)),
            places if self.features.rule is None else np.searchsorted(self._ends, places, side="right"),
        )

    def _places(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return placed(samples, self.samples, self.seed, _ROWS)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """How many rows there are up to each document's end."""
        rule, closed = self.features.rule, int(self.features.closed)
        assert rule is not None

        def amounts() -> Amounts:
            sizes = self.store.sizes()
            return lambda places: rows_in(sizes[places] - closed, rule)

        settings = hash_json([rule.model_dump(), closed])
        return running_sums(len(self.store), amounts, sums_path(self.folder, self.store, 0, "features", settings))


def opened_cells(table: Table, length: int, folder: Path | None) -> NDArray[np.int32]:
    """[rows, inputs and labels, length]: in memory without a folder, else in a file that one process makes while others wait."""
    shape = (table.count, 2, length)
    if folder is None:
        return np.concatenate([*_blocks(table, length), np.empty((0, 2, length), np.int32)])
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in table.files]
    path = folder / f"features-{hash_json([states, table.first, table.count, length])[:20]}.rows"
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_name("lock"), None):
        if not path.exists():
            with atomic_writer(path) as stream:
                for block in _blocks(table, length):
                    stream.write(block.data)
    return np.memmap(path, np.int32, "r", shape=shape)


def _blocks(table: Table, length: int) -> Iterator[NDArray[np.int32]]:
    for path, first, columns in table.columns(IDS, LABELS):
        inputs, labels = (_square(columns[name], length, path) for name in (IDS, LABELS))
        asked = np.where(labels < 0, np.int64(IGNORED), labels)
        _check_shifted(inputs, asked, path, table.first + first)
        yield np.stack([inputs, asked], axis=1).astype(np.int32)


def _square(column: Ragged, length: int, where: Path) -> NDArray[np.int64]:
    """Rows of one length; ids that do not fit 32 bits never come as others."""
    if wrong := np.flatnonzero(column.lengths != length).tolist():
        found = int(column.lengths[wrong[0]])
        raise TextmillError(
            f"{where}: holds a row of {found} tokens, train.length is {length}; set train.length={found}, the same for all rows"
        )
    values = column.values.astype(np.int64).reshape(-1, length)
    if len(values) and (int(values.max()) > np.iinfo(np.int32).max or int(values.min()) < np.iinfo(np.int32).min):
        raise TextmillError(f"{where}: holds the number {int(values.max())}, which is no token id; make the rows anew")
    return values


def _check_shifted(inputs: NDArray[np.int64], labels: NDArray[np.int64], path: Path, first: int) -> None:
    """Labels that are the inputs themselves would teach a net to repeat its input."""
    wrong = (labels[:, :-1] != IGNORED) & (labels[:, :-1] != inputs[:, 1:])
    if wrong.any():
        raise TextmillError(
            f"{path}: the labels of row {first + int(np.argmax(wrong.any(1))):,} are not its next tokens; "
            f"rows whose labels repeat the inputs, as grouped datasets have them, train with train.layout=padded"
        )
