"""The prepared corpus on disk: Parquet shards of text, source, id and metadata, one file a split and piece of input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from textmill.corpus.conversations import turns_from_json
from textmill.corpus.document import Document, Split
from textmill.errors import TextmillError
from textmill.storage.files import writing

SCHEMA = pa.schema([("text", pa.string()), ("source", pa.string()), ("id", pa.string()), ("meta", pa.string())])
CHAT_SCHEMA = SCHEMA.append(pa.field("messages", pa.string()))
"""Of conversations the turns besides, as JSON."""
GROUP_BYTES = 16 << 20
GROUP_ROWS = 1 << 16
BATCH_ROWS = 1024


def shard_name(split: Split, number: int) -> str:
    """The file of a split that a piece of input leads to."""
    return f"{split}-{number:05d}.parquet"


def list_shards(folder: Path, split: Split) -> list[Path]:
    """A split's shards in canonical order; none when the split is empty."""
    found = folder.glob(f"{split}-*.parquet")
    return sorted(found, key=lambda path: (len(path.name), path.name))


def read_documents(path: Path) -> Iterator[Document]:
    """The documents of a shard, one by one."""
    for batch in _batches(path, CHAT_SCHEMA.names):
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            fields = dict(zip(batch.schema.names, row, strict=True))
            messages = fields.pop("messages", None)
            yield Document(**fields, turns=tuple(turns_from_json(messages)) if messages else None)


def read_texts(path: Path) -> Iterator[list[str]]:
    """The texts of a shard, in batches."""
    for batch in _batches(path, ["text"]):
        yield batch.column(0).to_pylist()


def count_group_rows(path: Path) -> list[int]:
    """How many rows each group of a shard has."""
    with open_shard(path) as shard:
        return [shard.metadata.row_group(group).num_rows for group in range(shard.num_row_groups)]


def count_group_bytes(path: Path) -> list[int]:
    """How many bytes each group of a shard has in memory."""
    with open_shard(path) as shard:
        return [shard.metadata.row_group(group).total_byte_size for group in range(shard.num_row_groups)]


def read_groups(
    path: Path, groups: Iterable[int], columns: list[str], max_rows: int | None = None
) -> Iterator[pa.Table]:
    """Columns of some groups of a shard, a table a group, each column in one piece; `most`: only so many rows of each."""
    with open_shard(path) as shard:
        _check_columns(path, shard, columns)
        for group in groups:
            if max_rows is None:
                yield shard.read_row_group(group, columns, use_threads=False).combine_chunks()
            else:
                batches = shard.iter_batches(max_rows, [group], columns, use_threads=False)
                yield pa.Table.from_batches([next(batches)])


def count_documents(path: Path) -> int:
    """How many documents a shard has."""
    with open_shard(path) as shard:
        return int(shard.metadata.num_rows)


def read_places(path: Path) -> Iterator[tuple[str, str]]:
    """Source and id of each document of a shard; the texts are not read."""
    for batch in _batches(path, ["source", "id"]):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


@contextmanager
def open_shard(path: Path) -> Iterator[pq.ParquetFile]:
    """A Parquet file whose pages are checked as they are read; whatever is wrong with it names the file."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as shard:
            yield shard
    except FileNotFoundError:
        raise TextmillError(f"{path}: no such file; make the corpus with: textmill prepare") from None
    except (pa.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TextmillError(
            f"{path}: damaged ({first_line}); make the corpus anew with: textmill prepare --force"
        ) from None


def _batches(path: Path, columns: list[str]) -> Iterator[Any]:
    with open_shard(path) as shard:
        names = _check_columns(path, shard, columns)
        yield from shard.iter_batches(
            batch_size=BATCH_ROWS, columns=[name for name in columns if name in names], use_threads=False
        )


def _check_columns(path: Path, shard: pq.ParquetFile, columns: list[str]) -> list[str]:
    names: list[str] = shard.schema_arrow.names
    missing = set(columns) - {
        *names,
        "meta",
        "messages",
    }  # shards of the first version have no metadata, and plain text has no turns
    if missing:
        raise TextmillError(f"{path}: not a shard of ours; found the columns {names}, not {sorted(missing)}")
    return names


class ShardWriter:
    """Gathers tables into row groups of bounded size; where they end depends on the rows alone."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self.writer = writer
        self.pending: list[pa.Table] = []

    def add(self, table: pa.Table) -> None:
        """Write these rows after those before."""
        if table.num_rows:
            self.pending.append(table)
            if (
                sum(one.nbytes for one in self.pending) >= GROUP_BYTES
                or sum(one.num_rows for one in self.pending) >= GROUP_ROWS
            ):
                self.flush()

    def flush(self) -> None:
        """End the row group."""
        if self.pending:
            table = pa.concat_tables(self.pending).combine_chunks()
            self.writer.write_table(table, row_group_size=max(table.num_rows, 1))
            self.pending = []


@contextmanager
def new_shard(path: Path, schema: pa.Schema = SCHEMA, compression: str = "zstd") -> Iterator[ShardWriter]:
    """A shard to fill, which appears whole or not at all."""
    options: dict[str, Any] = {"compression": compression, "write_statistics": False, "write_page_checksum": True}
    with writing(path) as stream, pq.ParquetWriter(stream, schema, use_dictionary=["source"], **options) as writer:
        shard = ShardWriter(writer)
        yield shard
        shard.flush()
