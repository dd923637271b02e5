"""Cuts token stores into feature rows of one length, by the rule of jax-lm-training, and writes Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from textmill.config import RunConfig
from textmill.config.tokens import FeaturesConfig
from textmill.corpus.document import SPLITS
from textmill.ranges import expand_ranges
from textmill.storage.files import atomic_writer
from textmill.tokens.batches.layout import gather_ranges
from textmill.tokens.split_files import make_file_folder, write_split_files
from textmill.tokens.store import TokenStore, open_store
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

FOLDER = "features"
"""The subfolder of the tokens folder with the Parquet files."""
SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int64())), ("attention_mask", pa.list_(pa.float32())), ("labels", pa.list_(pa.int64()))]
)
FILE_TOKENS = 1 << 22
"""About how many tokens of a store go into one file."""
ROW_GROUP_TOKENS = 1 << 20
"""Tokens of rows in one Parquet row group; rows are built one row group at a time."""


@dataclass(frozen=True)
class Chunks:
    """Ranges of documents, in the order of the documents."""

    documents: NDArray[np.int64]
    """The document of each chunk."""
    starts: NDArray[np.int64]
    """Where the chunk starts in its document."""
    counts: NDArray[np.int64]
    """How many tokens the chunk has."""


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


def count_feature_rows(lengths: NDArray[Any], rule: FeaturesConfig) -> NDArray[np.int64]:
    """How many rows documents of these lengths give: one every `stride` tokens while enough tokens are left.

    With a stride of 4, a document of 10 tokens has starts at 0, 4 and 8, where 10, 6 and 2 tokens are left. If 2 are
    too few, it gives 2 rows.
    """
    too_few = rule.min_length - rule.reserved_tokens
    starts = -(-lengths // rule.stride)
    starts_with_enough = -(-(lengths - too_few) // rule.stride)
    rows: NDArray[np.int64] = np.maximum(np.minimum(starts, starts_with_enough), 0).astype(np.int64)
    return rows


def cut_chunks(lengths: NDArray[Any], rule: FeaturesConfig) -> Chunks:
    """Cut documents of these lengths into chunks."""
    rows = count_feature_rows(lengths, rule)
    documents = np.repeat(np.arange(len(lengths), dtype=np.int64), rows)
    starts = expand_ranges(0, rows) * rule.stride
    most = rule.max_length - rule.reserved_tokens + 1
    return Chunks(documents, starts, np.minimum(lengths[documents] - starts, most))


def build_rows(
    ids: NDArray[Any], counts: NDArray[np.int64], rule: FeaturesConfig, special: int
) -> dict[str, NDArray[Any]]:
    """Build rows from chunks, which are concatenated in `ids`: special token, chunk, special token, padding.

    Padding has attention mask 0 and no loss.
    """
    width = rule.max_length + 1
    rows = np.full((len(counts), max(width, int(counts.max(initial=0)) + 2)), 0 if rule.pad_zero else special, np.int64)
    positions = np.arange(rows.shape[1])
    lengths = counts[:, None]
    rows[(positions >= 1) & (positions <= lengths)] = ids
    rows[:, 0] = special
    rows[np.arange(len(counts)), counts + 1] = special
    filled = rows > 0 if rule.pad_zero else positions < lengths + 2
    labels = np.where(filled[:, 1:width], rows[:, 1:width], rule.ignore_label)
    return {
        "input_ids": rows[:, : rule.max_length],
        "attention_mask": filled[:, : rule.max_length].astype(np.float32),
        "labels": labels,
    }


def write_features(config: RunConfig, folder: Path) -> dict[str, dict[str, Any]]:
    """If `tokens.kind=features`, write the rows of every split in `folder`; return length and checksum of each file."""
    if config.tokens.kind != "features":
        return {}
    make_file_folder(folder / FOLDER)
    special = open_tokenizer(config.folder_of("tokenizer")).end
    tasks = [task for split in SPLITS for task in _plan_files(config, folder, split, special)]
    rows, files = write_split_files(config, tasks, write_file, "features")
    print(f"tokenize: {rows:,} rows of {config.tokens.features.max_length} tokens in {len(tasks)} files of {FOLDER}/")
    return files


def _plan_files(config: RunConfig, folder: Path, split: str, special: int) -> list[FeatureFile]:
    """Divide a store into files of about FILE_TOKENS tokens; the borders depend only on the documents."""
    store = open_store(folder / split)
    if not len(store):
        return []
    ends = np.cumsum(store.document_lengths(), dtype=np.int64)
    count = max(1, round(store.tokens / FILE_TOKENS))
    cuts = np.searchsorted(ends, store.tokens * np.arange(1, count) // count, side="right")
    edges = [0, *sorted(set(cuts.tolist()) - {0, len(store)}), len(store)]
    total = len(edges) - 1
    shared = (config.tokens.features, config.tokens.append_end, special)
    paths = [folder / FOLDER / f"{split}-{number:05d}-of-{total:05d}.parquet" for number in range(total)]
    return [
        FeatureFile(store.prefix, edges[number], edges[number + 1], path, *shared) for number, path in enumerate(paths)
    ]


def write_file(task: FeatureFile) -> int:
    """Write one file of rows unless it exists already; return its number of rows."""
    if not task.path.exists():
        options: dict[str, Any] = {"compression": "zstd", "write_statistics": False, "write_page_checksum": True}
        with atomic_writer(task.path) as stream, pq.ParquetWriter(stream, SCHEMA, **options) as writer:
            for table in _tables(open_store(task.prefix).slice(task.first, task.end), task):
                writer.write_table(table)
    return int(pq.read_metadata(task.path).num_rows)


def _tables(store: TokenStore, task: FeatureFile) -> Iterator[pa.Table]:
    """The rows of these documents, one row group at a time."""
    rule = task.rule
    ids = np.asarray(store.ids)
    chunks = cut_chunks(np.maximum(store.document_lengths() - int(task.has_end_token), 0), rule)
    step = max(1, ROW_GROUP_TOKENS // rule.max_length)
    for start in range(0, len(chunks.counts), step):
        part = slice(start, start + step)
        begins = store.document_starts(chunks.documents[part]) + chunks.starts[part]
        counts = chunks.counts[part]
        rows = build_rows(gather_ranges(ids, begins, counts), counts, rule, task.special)
        offsets = np.arange(len(counts) + 1, dtype=np.int32) * rule.max_length
        columns = [
            pa.ListArray.from_arrays(offsets, pa.array(rows[name].ravel()), type=SCHEMA.field(name).type)
            for name in SCHEMA.names
        ]
        yield pa.Table.from_arrays(columns, schema=SCHEMA)
