"""Rows of one length in Parquet, cut from the token stores by the rule of jax-lm-training, readable with datasets."""

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
from textmill.runners import open_runner
from textmill.storage.files import atomic_writer, manifest_entry
from textmill.storage.progress import progress
from textmill.tokens.batches.layout import gathered
from textmill.tokens.store import TokenStore, open_store
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

FOLDER = "features"
"""Where the rows stand, inside the tokens folder."""
SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int64())), ("attention_mask", pa.list_(pa.float32())), ("labels", pa.list_(pa.int64()))]
)
SHARD = 1 << 22
"""Tokens of a store, about, whose rows make a file."""
CELLS = 1 << 20
"""Tokens of rows made at a time, and in a row group."""


@dataclass(frozen=True)
class Chunks:
    """Stretches of documents, in their order."""

    documents: NDArray[np.int64]
    """The document that each is of."""
    starts: NDArray[np.int64]
    """Where it begins in the document."""
    counts: NDArray[np.int64]
    """Its tokens."""


@dataclass(frozen=True)
class Piece:
    """A run of documents, and the file that comes of it."""

    prefix: Path
    first: int
    end: int
    path: Path
    rule: FeaturesConfig
    closed: bool
    """Whether each document of the store ends with an end-of-text token, which is not a part of it here."""
    special: int
    """The token at both ends of a row."""


def rows_in(sizes: NDArray[Any], rule: FeaturesConfig) -> NDArray[np.int64]:
    """Rows that documents of these sizes give: a chunk every `stride` tokens, as long as enough tokens are left for one."""
    starts, long_enough = (
        -(-amount // rule.stride) for amount in (sizes, sizes - (rule.min_length - rule.reserved_tokens))
    )
    many: NDArray[np.int64] = np.maximum(np.minimum(starts, long_enough), 0).astype(np.int64)
    return many


def chunks_of(sizes: NDArray[Any], rule: FeaturesConfig) -> Chunks:
    """The chunks of documents of these sizes."""
    many = rows_in(sizes, rule)
    documents = np.repeat(np.arange(len(sizes), dtype=np.int64), many)
    starts = (np.arange(len(documents)) - np.repeat(np.cumsum(many) - many, many)) * rule.stride
    return Chunks(documents, starts, np.minimum(sizes[documents] - starts, rule.max_length - rule.reserved_tokens + 1))


def packed_rows(
    ids: NDArray[Any], counts: NDArray[np.int64], rule: FeaturesConfig, special: int
) -> dict[str, NDArray[Any]]:
    """Chunks, one after the other in `ids`, as rows between two special tokens; padding is neither seen nor asked."""
    width = rule.max_length + 1
    rows = np.full((len(counts), max(width, int(counts.max(initial=0)) + 2)), 0 if rule.pad_zero else special, np.int64)
    places, lengths = np.arange(rows.shape[1]), counts[:, None]
    rows[(places >= 1) & (places <= lengths)] = ids
    rows[:, 0] = special
    rows[np.arange(len(counts)), counts + 1] = special
    filled = rows > 0 if rule.pad_zero else places < lengths + 2
    labels = np.where(filled[:, 1:width], rows[:, 1:width], rule.ignore_label)
    return {
        "input_ids": rows[:, : rule.max_length],
        "attention_mask": filled[:, : rule.max_length].astype(np.float32),
        "labels": labels,
    }


def write_features(config: RunConfig, folder: Path) -> dict[str, dict[str, Any]]:
    """Make the rows of every split's store in `folder`, where `tokens.kind` asks for them; the account of each file."""
    if config.tokens.kind != "features":
        return {}
    (folder / FOLDER).mkdir(exist_ok=True)
    for left in (folder / FOLDER).glob("*.tmp-*"):  # half written by a run that was killed
        left.unlink()
    special = open_tokenizer(config.folder_of("tokenizer")).end
    pieces = [piece for split in SPLITS for piece in _pieces(config, folder, split, special)]
    rows = 0
    with progress("tokenize: features", total=len(pieces), unit="files") as bar:
        for many in open_runner(config.runner).map(write_piece, pieces):
            rows += many
            bar.advance(1)
    print(f"tokenize: {rows:,} rows of {config.tokens.features.max_length} tokens in {len(pieces)} files of {FOLDER}/")
    return {f"{FOLDER}/{piece.path.name}": manifest_entry(piece.path) for piece in pieces}


def _pieces(config: RunConfig, folder: Path, split: str, special: int) -> list[Piece]:
    """Runs of documents of about SHARD tokens: where they end depends on the documents alone."""
    store = open_store(folder / split)
    if not len(store):
        return []
    ends = np.cumsum(store.sizes(), dtype=np.int64)
    count = max(1, round(store.tokens / SHARD))
    cuts = np.searchsorted(ends, store.tokens * np.arange(1, count) // count, side="right")
    edges = [0, *sorted(set(cuts.tolist()) - {0, len(store)}), len(store)]
    names = [
        folder / FOLDER / f"{split}-{number:05d}-of-{len(edges) - 1:05d}.parquet" for number in range(len(edges) - 1)
    ]
    return [
        Piece(
            store.prefix,
            edges[number],
            edges[number + 1],
            path,
            config.tokens.features,
            config.tokens.append_end,
            special,
        )
        for number, path in enumerate(names)
    ]


def write_piece(piece: Piece) -> int:
    """Write one file of rows, unless it stands there; return how many rows it has."""
    if not piece.path.exists():
        options: dict[str, Any] = {"compression": "zstd", "write_statistics": False, "write_page_checksum": True}
        with atomic_writer(piece.path) as stream, pq.ParquetWriter(stream, SCHEMA, **options) as writer:
            for table in _tables(open_store(piece.prefix).part(piece.first, piece.end), piece):
                writer.write_table(table)
    return int(pq.read_metadata(piece.path).num_rows)


def _tables(store: TokenStore, piece: Piece) -> Iterator[pa.Table]:
    """The rows of these documents, a row group at a time."""
    rule, ids = piece.rule, np.asarray(store.ids)
    chunks = chunks_of(np.maximum(store.sizes() - int(piece.closed), 0), rule)
    step = max(1, CELLS // rule.max_length)
    for start in range(0, len(chunks.counts), step):
        part = slice(start, start + step)
        begins, counts = store.borders(chunks.documents[part]) + chunks.starts[part], chunks.counts[part]
        rows = packed_rows(gathered(ids, begins, counts), counts, rule, piece.special)
        offsets = np.arange(len(counts) + 1, dtype=np.int32) * rule.max_length
        columns = [
            pa.ListArray.from_arrays(offsets, pa.array(rows[name].ravel()), type=SCHEMA.field(name).type)
            for name in SCHEMA.names
        ]
        yield pa.Table.from_arrays(columns, schema=SCHEMA)
