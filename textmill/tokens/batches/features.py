"""The features layout: ready-made rows of one length, whose labels are already shifted or, for BERT, masked tokens.

The rows are cut from a token store by the rule of jax-lm-training and written to Parquet files (`plan_feature_files`),
or come from files of others (tokens/existing_tokens.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from textmill.config.tokenizer import FeaturesConfig
from textmill.errors import TextmillError
from textmill.ranges import expand_ranges
from textmill.storage.files import atomic_writer, hash_json
from textmill.tokens.batches.batch import (
    IGNORED,
    Batch,
    Numbers,
    cached_array,
    check_ids,
    gather_ranges,
    prefix_sums,
    shuffle_in_epoch,
)
from textmill.tokens.existing_tokens import IDS, LABELS, MASK, PAIR, TYPES, ListColumn, Table, has_masked_rows
from textmill.tokens.splits import FeatureRows
from textmill.tokens.store import TokenStore, advise, open_store

_ROWS_KEY = 4
"""Key of the shuffle of rows."""
SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int64())), ("attention_mask", pa.list_(pa.float32())), ("labels", pa.list_(pa.int64()))]
)
FILE_TOKENS = 1 << 22
"""About how many tokens of a store go into one file."""
ROW_GROUP_TOKENS = 1 << 20
"""Tokens of rows in one Parquet row group; rows are built one row group at a time."""


@dataclass(eq=False)
class FeaturesLayout:
    """Rows, unchanged. Without a seed, in their own order. All processes share one memory-mapped int32 copy of them."""

    features: FeatureRows
    store: TokenStore
    _: KW_ONLY
    length: int
    seed: int | None
    vocab: int | None = None
    folder: Path | None = None
    pairs: bool = True

    def __post_init__(self) -> None:
        self.samples_per_epoch = self.features.table.count
        if not self.samples_per_epoch:
            raise TextmillError(
                f"{self.store.prefix}: has no rows to train on; lower tokens.features.min_length, or add text"
            )
        self.row_array = map_rows(self.features.table, self.length, self.folder)
        advise(self.row_array, random=self.seed is not None)

    def build_samples(self, samples: Numbers) -> Batch:
        """The rows with these numbers."""
        rows = np.asarray(self.row_array[self._positions(samples)])
        inputs = rows[:, 0]
        labels = rows[:, 1]
        check_ids(inputs.ravel(), self.vocab, self.features.table.files[0].parent)
        check_ids(labels[labels != IGNORED], self.vocab, self.features.table.files[0].parent)
        if rows.shape[1] == 2:
            return Batch(inputs, labels, samples)
        return Batch(inputs, labels, samples, rows[:, 2], rows[:, 3], rows[:, 4] if self.pairs else None)

    def find_documents(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """(row, document) of each sample."""
        documents = self._positions(samples)
        if self.features.rule is not None:
            documents = np.searchsorted(self._document_ends, documents, side="right")
        return np.arange(len(samples)), documents

    def _positions(self, samples: Numbers) -> Numbers:
        return shuffle_in_epoch(samples, self.samples_per_epoch, self.seed, _ROWS_KEY)

    @cached_property
    def _document_ends(self) -> Numbers:
        """The number of rows up to the end of each document."""
        rule = self.features.rule
        end_tokens = int(self.features.has_end_token)
        assert rule is not None

        return prefix_sums(
            self.store,
            lambda lengths, documents: count_feature_rows(lengths[documents] - end_tokens, rule),
            self.folder,
            0,
            "features",
            hash_json([rule.model_dump(), end_tokens]),
        )


def map_rows(table: Table, length: int, folder: Path | None) -> NDArray[np.int32]:
    """All rows as [rows, arrays, length]: in memory, or memory-mapped from a cache file in `folder`.

    The arrays are inputs and labels; for BERT also documents, types and pair labels.
    """
    arrays = 5 if has_masked_rows(table) else 2
    path = None
    if folder is not None:
        states = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in table.files]
        path = folder / f"features-{hash_json([states, table.first, table.count, length])[:20]}.rows"
    rows = cached_array(path, np.int32, lambda: _blocks(table, length, arrays))
    return rows.reshape(table.count, arrays, length)


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


def _check_classes(types: Numbers, pairs: Numbers, where: Path, first: int) -> None:
    """Raise an error for segments other than 0 and 1, and for labels of pairs other than these and none."""
    for name, values, least in ((TYPES, types, 0), (PAIR, pairs, IGNORED)):
        if wrong := np.flatnonzero(((values < least) | (values > 1)).any(1)).tolist():
            raise TextmillError(
                f"{where}: row {first + wrong[0]:,}: '{name}' has a number other than 0 and 1; make the file again, or "
                "remove it from tokens.use"
            )


def _as_matrix(column: ListColumn, length: int, where: Path) -> Numbers:
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


def _check_shifted(inputs: Numbers, labels: Numbers, path: Path, first: int) -> None:
    """Raise an error if labels are not shifted: labels equal to the inputs would train a net to copy its input."""
    wrong = (labels[:, :-1] != IGNORED) & (labels[:, :-1] != inputs[:, 1:])
    if wrong.any():
        raise TextmillError(
            f"{path}: the labels of row {first + int(np.argmax(wrong.any(1))):,} are not its next tokens; "
            f"if the labels repeat the inputs, as in grouped datasets, train with train.layout=padded"
        )


@dataclass(frozen=True)
class Chunks:
    """Ranges of documents, in the order of the documents."""

    documents: Numbers
    """The document of each chunk."""
    starts: Numbers
    """Where the chunk starts in its document."""
    counts: Numbers
    """How many tokens the chunk has."""


def count_feature_rows(lengths: NDArray[Any], rule: FeaturesConfig) -> Numbers:
    """How many rows documents of these lengths give: one every `stride` tokens while enough tokens are left.

    With a stride of 4, a document of 10 tokens has starts at 0, 4 and 8, where 10, 6 and 2 tokens are left. If 2 are
    too few, it gives 2 rows.
    """
    too_few = rule.min_length - rule.reserved_tokens
    starts = -(-lengths // rule.stride)
    starts_with_enough = -(-(lengths - too_few) // rule.stride)
    rows: Numbers = np.maximum(np.minimum(starts, starts_with_enough), 0).astype(np.int64)
    return rows


def cut_chunks(lengths: NDArray[Any], rule: FeaturesConfig) -> Chunks:
    """Cut documents of these lengths into chunks."""
    rows = count_feature_rows(lengths, rule)
    documents = np.repeat(np.arange(len(lengths), dtype=np.int64), rows)
    starts = expand_ranges(0, rows) * rule.stride
    most = rule.max_length - rule.reserved_tokens + 1
    return Chunks(documents, starts, np.minimum(lengths[documents] - starts, most))


def build_rows(ids: NDArray[Any], counts: Numbers, rule: FeaturesConfig, special: int) -> dict[str, NDArray[Any]]:
    """Build rows from chunks, which are concatenated in `ids`: special token, chunk, special token, padding.

    Padding is the special token too, with attention mask 0 and no loss.
    """
    width = rule.max_length + 1
    rows = np.full((len(counts), max(width, int(counts.max(initial=0)) + 2)), special, np.int64)
    positions = np.arange(rows.shape[1])
    lengths = counts[:, None]
    rows[(positions >= 1) & (positions <= lengths)] = ids
    filled = positions < lengths + 2
    labels = np.where(filled[:, 1:width], rows[:, 1:width], IGNORED)
    return {
        "input_ids": rows[:, : rule.max_length],
        "attention_mask": filled[:, : rule.max_length].astype(np.float32),
        "labels": labels,
    }


def plan_feature_files(
    folder: Path, prefix: Path, rule: FeaturesConfig, has_end_token: bool, special: int
) -> list[FeatureFile]:
    """Divide a store into files of about FILE_TOKENS tokens; the borders depend only on the documents."""
    store = open_store(prefix)
    if not len(store):
        return []
    ends = np.cumsum(store.document_lengths(), dtype=np.int64)
    count = max(1, round(store.tokens / FILE_TOKENS))
    cuts = np.searchsorted(ends, store.tokens * np.arange(1, count) // count, side="right")
    edges = [0, *sorted(set(cuts.tolist()) - {0, len(store)}), len(store)]
    names = [f"{prefix.name}-{number:05d}-of-{len(edges) - 1:05d}.parquet" for number in range(len(edges) - 1)]
    return [
        FeatureFile(prefix, first, end, folder / name, rule, has_end_token, special)
        for name, (first, end) in zip(names, pairwise(edges), strict=True)
    ]


@dataclass(frozen=True)
class FeatureFile:
    """A task for one worker: consecutive documents, and the file that their rows are written to."""

    prefix: Path
    first: int
    end: int
    path: Path
    rule: FeaturesConfig
    has_end_token: bool
    """Whether each document of the store ends with an end-of-text token, which is left out of the rows."""
    special: int
    """The token at the start and at the end of each row."""

    def write(self) -> int:
        """Write the file unless it exists already; return its number of rows."""
        if not self.path.exists():
            options: dict[str, Any] = {"compression": "zstd", "write_statistics": False, "write_page_checksum": True}
            with atomic_writer(self.path) as stream, pq.ParquetWriter(stream, SCHEMA, **options) as writer:
                for table in self._row_groups(open_store(self.prefix).slice(self.first, self.end)):
                    writer.write_table(table)
        return int(pq.read_metadata(self.path).num_rows)

    def _row_groups(self, store: TokenStore) -> Iterator[pa.Table]:
        rule = self.rule
        ids = np.asarray(store.ids)
        chunks = cut_chunks(np.maximum(store.document_lengths() - int(self.has_end_token), 0), rule)
        step = max(1, ROW_GROUP_TOKENS // rule.max_length)
        for start in range(0, len(chunks.counts), step):
            part = slice(start, start + step)
            begins = store.document_starts(chunks.documents[part]) + chunks.starts[part]
            counts = chunks.counts[part]
            rows = build_rows(gather_ranges(ids, begins, counts), counts, rule, self.special)
            offsets = np.arange(len(counts) + 1, dtype=np.int32) * rule.max_length
            columns = [
                pa.ListArray.from_arrays(offsets, pa.array(rows[name].ravel()), type=SCHEMA.field(name).type)
                for name in SCHEMA.names
            ]
            yield pa.Table.from_arrays(columns, schema=SCHEMA)
