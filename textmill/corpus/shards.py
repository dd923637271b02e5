"""Read and write the Parquet shards of a prepared corpus, one shard per split and source chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from textmill.corpus.conversations import turns_from_json
from textmill.corpus.document import SPLITS, Document, Split
from textmill.errors import TextmillError
from textmill.storage.files import atomic_writer
from textmill.storage.stages import open_manifest

SCHEMA = pa.schema([("text", pa.string()), ("source", pa.string()), ("id", pa.string()), ("meta", pa.string())])
CHAT_SCHEMA = SCHEMA.append(pa.field("messages", pa.string()))
"""Conversations also have their turns, as JSON."""
GROUP_BYTES = 16 << 20
GROUP_ROWS = 1 << 16
"""A row group ends at this many bytes or rows."""
BATCH_ROWS = 1024
BUFFER_CHARACTERS = 4 << 20
"""Characters of single rows that are collected before they become a table."""
CACHED_GROUPS = 4
"""Row groups kept in memory."""


def open_corpus(folder: Path | str, split: Split | None = None) -> Corpus:
    """Open the prepared corpus in a folder: one split, or all splits in order."""
    folder = Path(folder)
    open_manifest(folder, "prepare")
    return Corpus([path for name in ([split] if split else SPLITS) for path in list_shards(folder, name)])


class Corpus(Sequence[Document]):
    """Documents by position; a row group is read when it is first needed."""

    def __init__(self, shards: list[Path]) -> None:
        self.shards = shards
        self._groups: list[tuple[Path, int]] = []
        rows = []
        for path in shards:
            for group, count in enumerate(count_group_rows(path)):
                self._groups.append((path, group))
                rows.append(count)
        self._group_ends: NDArray[np.int64] = np.cumsum(rows, dtype=np.int64)
        self._cached_columns = lru_cache(maxsize=CACHED_GROUPS)(self._read_columns)

    def __len__(self) -> int:
        return int(self._group_ends[-1]) if len(self._group_ends) else 0

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"document {index} is out of range; the corpus has {len(self):,}")
        group = int(np.searchsorted(self._group_ends, position, side="right"))
        row = position - (int(self._group_ends[group - 1]) if group else 0)
        return Document(*(column[row].as_py() for column in self._cached_columns(group)))

    def __iter__(self) -> Iterator[Document]:
        for path in self.shards:
            yield from read_documents(path)

    def _read_columns(self, group: int) -> list[Any]:
        path, number = self._groups[group]
        (table,) = read_groups(path, [number], ["text", "source", "id"])
        return [table.column(name) for name in ("text", "source", "id")]


def shard_name(kind: Split | Literal["dropped"], number: int) -> str:
    """The file name of a split's shard for one source chunk, or of the documents that were dropped."""
    return f"{kind}-{number:05d}.parquet"


def shard_number(path: Path) -> int:
    """The number of a shard's source chunk."""
    return int(path.stem.rpartition("-")[2])


def list_shards(folder: Path, kind: Split | Literal["dropped"]) -> list[Path]:
    """The shards of a split, in order; empty if the split is empty. "dropped" needs `corpus.keep_dropped`."""
    found = folder.glob(f"{kind}-*.parquet")
    return sorted(found, key=lambda path: (len(path.name), path.name))


def read_documents(path: Path) -> Iterator[Document]:
    """Yield the documents of a shard."""
    with open_shard(path) as shard:
        names = _check_columns(path, shard, SCHEMA.names)
        columns = [name for name in CHAT_SCHEMA.names if name in names]
        for group in range(shard.num_row_groups):  # iter_batches would end early if a column is too short
            for batch in shard.read_row_group(group, columns, use_threads=False).to_batches(BATCH_ROWS):
                for row in batch.to_pylist():
                    messages = row.pop("messages", None)
                    yield Document(**row, turns=tuple(turns_from_json(messages)) if messages else None)


def count_group_rows(path: Path) -> list[int]:
    """Rows of each row group of a shard."""
    with open_shard(path) as shard:
        return [shard.metadata.row_group(group).num_rows for group in range(shard.num_row_groups)]


def count_group_bytes(path: Path) -> list[int]:
    """Bytes of each row group of a shard, uncompressed."""
    with open_shard(path) as shard:
        return [shard.metadata.row_group(group).total_byte_size for group in range(shard.num_row_groups)]


def read_groups(
    path: Path, groups: Iterable[int], columns: list[str], max_rows: int | None = None
) -> Iterator[pa.Table]:
    """Yield one table per row group, with these columns, each in one contiguous array.

    `max_rows`: read only the first rows of each group.
    """
    with open_shard(path) as shard:
        _check_columns(path, shard, columns)
        for group in groups:
            if max_rows is None:
                yield shard.read_row_group(group, columns, use_threads=False).combine_chunks()
            else:
                batches = shard.iter_batches(max_rows, [group], columns, use_threads=False)
                yield pa.Table.from_batches([next(batches)])


def take_rows(path: Path, columns: list[str], rows: NDArray[np.int64]) -> pa.Table:
    """Some rows of a shard, in the order that they are named."""
    with open_shard(path) as shard:
        tables = []
        start = 0
        for group in range(shard.num_row_groups):
            count = shard.metadata.row_group(group).num_rows
            group_rows = np.unique(rows[(rows >= start) & (rows < start + count)])
            if len(group_rows):
                table = shard.read_row_group(group, columns, use_threads=False)
                tables.append(table.take(pa.array(group_rows - start)))
            start += count
    return pa.concat_tables(tables).take(pa.array(np.searchsorted(np.unique(rows), rows)))


@contextmanager
def open_shard(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file and verify its page checksums; errors name the file."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as shard:
            yield shard
    except FileNotFoundError:
        raise TextmillError(f"{path}: no such file; create the corpus with: textmill prepare") from None
    except (pa.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TextmillError(
            f"{path}: damaged ({first_line}); build the corpus again with: textmill prepare WHERE --force"
        ) from None


def _check_columns(path: Path, shard: pq.ParquetFile, columns: list[str]) -> list[str]:
    names: list[str] = shard.schema_arrow.names
    missing = set(columns) - {*names, "messages"}  # only conversations have messages
    if missing:
        raise TextmillError(f"{path}: not a corpus shard; found the columns {names}; missing: {sorted(missing)}")
    return names


@contextmanager
def new_shard(path: Path, schema: pa.Schema = SCHEMA, compression: str = "zstd") -> Iterator[ShardWriter]:
    """Open a new shard for writing; the file is written atomically."""
    options: dict[str, Any] = {"compression": compression, "write_statistics": False, "write_page_checksum": True}
    with (
        atomic_writer(path) as stream,
        pq.ParquetWriter(stream, schema, use_dictionary=["source"], **options) as writer,
    ):
        shard = ShardWriter(writer)
        yield shard
        shard.flush()


@contextmanager
def new_row_shard(path: Path, schema: pa.Schema = SCHEMA, compression: str = "zstd") -> Iterator[RowWriter]:
    """Open a new shard for writing single rows."""
    with new_shard(path, schema, compression) as shard:
        writer = RowWriter(shard, schema)
        yield writer
        writer.flush()


class ShardWriter:
    """Collect tables into row groups of limited size; the group boundaries depend on the rows alone."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self.writer = writer
        self.pending: list[pa.Table] = []

    def add(self, table: pa.Table) -> None:
        if table.num_rows:
            self.pending.append(table)
            if (
                sum(table.nbytes for table in self.pending) >= GROUP_BYTES
                or sum(table.num_rows for table in self.pending) >= GROUP_ROWS
            ):
                self.flush()

    def flush(self) -> None:
        """Write the pending rows as one row group."""
        if self.pending:
            table = pa.concat_tables(self.pending).combine_chunks()
            self.writer.write_table(table, row_group_size=max(table.num_rows, 1))
            self.pending = []


@dataclass
class RowWriter:
    """Collects rows of texts, and gives them to a shard a few megabytes at a time."""

    shard: ShardWriter
    schema: pa.Schema
    rows: list[tuple[str | int | None, ...]] = field(default_factory=list)
    characters: int = 0

    def add(self, row: tuple[str | int | None, ...], characters: int) -> None:
        self.rows.append(row)
        self.characters += characters
        if self.characters >= BUFFER_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.schema)
        arrays = [pa.array(column, kind) for column, kind in zip(columns, self.schema.types, strict=True)]
        self.shard.add(pa.table(arrays, schema=self.schema))
        self.rows = []
        self.characters = 0
