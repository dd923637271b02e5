"""The features layout: ready-made rows of one length, whose labels are already shifted or, for BERT, masked tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.storage.files import atomic_writer, file_lock, hash_json
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.batches.layout import SampleArrays, SampleDocuments, check_ids
from textmill.tokens.batches.prefix_sums import CountAt, prefix_sums, prefix_sums_path
from textmill.tokens.batches.shuffle import shuffle_in_epoch
from textmill.tokens.features import count_feature_rows
from textmill.tokens.mmap_advice import advise
from textmill.tokens.splits import FeatureRows
from textmill.tokens.store import TokenStore
from textmill.tokens.token_tables import IDS, LABELS, MASK, PAIR, TYPES, ListColumn, Table, has_masked_rows

_ROWS_KEY = 4
"""Key of the shuffle of rows."""


class FeaturesLayout:
    """Rows, unchanged. Without a seed, in their own order. All processes share one memory-mapped int32 copy of them."""

    def __init__(
        self,
        features: FeatureRows,
        store: TokenStore,
        *,
        length: int,
        seed: int | None,
        vocab: int | None = None,
        folder: Path | None = None,
        pairs: bool = True,
    ) -> None:
        self.features = features
        self.store = store
        self.length = length
        self.seed = seed
        self.vocab = vocab
        self.folder = folder
        self.pairs = pairs
        self.samples_per_epoch = features.table.count
        if not self.samples_per_epoch:
            raise TextmillError(
                f"{store.prefix}: has no rows to train on; lower tokens.features.min_length, or add text"
            )
        self.row_array = map_rows(features.table, length, folder)
        advise(self.row_array, random=seed is not None)

    def build_samples(self, samples: NDArray[np.int64]) -> SampleArrays:
        """The rows with these numbers."""
        rows = np.asarray(self.row_array[self._positions(samples)])
        inputs, labels, *masked = (rows[:, number] for number in range(rows.shape[1]))
        if masked and not self.pairs:
            del masked[-1]
        check_ids(inputs.ravel(), self.vocab, self.features.table.files[0].parent)
        check_ids(labels[labels != IGNORED], self.vocab, self.features.table.files[0].parent)
        return SampleArrays(inputs, labels, *masked)

    def find_documents(self, samples: NDArray[np.int64]) -> SampleDocuments:
        """The document of each row."""
        positions = self._positions(samples)
        return SampleDocuments(
            np.arange(len(samples)),
            positions if self.features.rule is None else np.searchsorted(self._document_ends, positions, side="right"),
        )

    def _positions(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return shuffle_in_epoch(samples, self.samples_per_epoch, self.seed, _ROWS_KEY)

    @cached_property
    def _document_ends(self) -> NDArray[np.int64]:
        """The number of rows up to the end of each document."""
        rule = self.features.rule
        end_tokens = int(self.features.has_end_token)
        assert rule is not None

        def build_counts() -> CountAt:
            lengths = self.store.document_lengths()
            return lambda documents: count_feature_rows(lengths[documents] - end_tokens, rule)

        settings = hash_json([rule.model_dump(), end_tokens])
        path = prefix_sums_path(self.folder, self.store, 0, "features", settings)
        return prefix_sums(len(self.store), build_counts, path)


def map_rows(table: Table, length: int, folder: Path | None) -> NDArray[np.int32]:
    """All rows as [rows, arrays, length]: in memory, or memory-mapped from a cache file in `folder`.

    The arrays are inputs and labels; for BERT also documents, types and pair labels. One process writes the cache file
    while the others wait.
    """
    arrays = 5 if has_masked_rows(table) else 2
    shape = (table.count, arrays, length)
    if folder is None:
        return np.concatenate([*_blocks(table, length, arrays), np.empty((0, arrays, length), np.int32)])
    states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in table.files]
    path = folder / f"features-{hash_json([states, table.first, table.count, length])[:20]}.rows"
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_name("lock"), None):
        if not path.exists():
            with atomic_writer(path) as stream:
                for block in _blocks(table, length, arrays):
                    stream.write(block.data)
    return np.memmap(path, np.int32, "r", shape=shape)


def _blocks(table: Table, length: int, arrays: int) -> Iterator[NDArray[np.int32]]:
    names = (IDS, LABELS) if arrays == 2 else (IDS, LABELS, MASK, TYPES, PAIR)
    for path, first, columns in table.read_columns(*names):
        inputs, labels = (_as_matrix(columns[name], length, path) for name in (IDS, LABELS))
        labels = np.where(labels < 0, np.int64(IGNORED), labels)
        if arrays == 2:
            _check_shifted(inputs, labels, path, table.first + first)
            yield np.stack([inputs, labels], axis=1).astype(np.int32)
            continue
        mask = _as_matrix(columns[MASK], length, path) if MASK in columns else np.ones_like(inputs)
        pairs = np.full_like(inputs, IGNORED)
        pairs[:, :1] = _as_matrix(columns[PAIR], 1, path)
        types = _as_matrix(columns[TYPES], length, path)
        pairs = np.where(pairs < 0, np.int64(IGNORED), pairs)
        _check_classes(types, pairs, path, table.first + first)
        yield np.stack([inputs, labels, mask, types, pairs], axis=1).astype(np.int32)


def _check_classes(types: NDArray[np.int64], pairs: NDArray[np.int64], where: Path, first: int) -> None:
    """Raise an error for segments other than 0 and 1, and for labels of pairs other than these and none."""
    for name, values, least in ((TYPES, types, 0), (PAIR, pairs, IGNORED)):
        if wrong := np.flatnonzero(((values < least) | (values > 1)).any(1)).tolist():
            raise TextmillError(
                f"{where}: row {first + wrong[0]:,}: '{name}' has a number other than 0 and 1; make the file again, or "
                "remove it from tokens.use"
            )


def _as_matrix(column: ListColumn, length: int, where: Path) -> NDArray[np.int64]:
    """[rows, length]; raises an error if a row has another length or a number does not fit into 32 bits."""
    if wrong := np.flatnonzero(column.lengths != length).tolist():
        found = int(column.lengths[wrong[0]])
        raise TextmillError(
            f"{where}: has a row of {found} tokens, but train.length is {length}; "
            f"all rows need the same length: set train.length={found}"
        )
    values = column.values.astype(np.int64).reshape(-1, length)
    if len(values) and (int(values.max()) > np.iinfo(np.int32).max or int(values.min()) < np.iinfo(np.int32).min):
        raise TextmillError(f"{where}: contains {int(values.max())}, which is not a token id; write the rows again")
    return values


def _check_shifted(inputs: NDArray[np.int64], labels: NDArray[np.int64], path: Path, first: int) -> None:
    """Raise an error if labels are not shifted: labels equal to the inputs would train a net to copy its input."""
    wrong = (labels[:, :-1] != IGNORED) & (labels[:, :-1] != inputs[:, 1:])
    if wrong.any():
        raise TextmillError(
            f"{path}: the labels of row {first + int(np.argmax(wrong.any(1))):,} are not its next tokens; "
            f"if the labels repeat the inputs, as in grouped datasets, train with train.layout=padded"
        )
