"""Lineage: the source and id of every document of a store, one row per document in a Parquet file next to the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from textmill.corpus.shards import ShardWriter, count_group_rows, new_shard, read_groups

SCHEMA = pa.schema([("source", pa.string()), ("id", pa.string())])


def lineage_path(prefix: Path) -> Path:
    """The lineage file of the store with this prefix."""
    return prefix.with_name(prefix.name + ".lineage.parquet")


class LineageWriter:
    """Writes rows as a stream."""

    def __init__(self, shard: ShardWriter) -> None:
        self._shard = shard

    def add(self, sources: Any, ids: Any) -> None:
        """Add documents, as Arrow columns or lists."""
        self._shard.add(pa.table([sources, ids], schema=SCHEMA))

    def add_file(self, path: Path) -> None:
        """Add all rows of another lineage file."""
        for table in read_groups(path, range(len(count_group_rows(path))), SCHEMA.names):
            self._shard.add(table)


@contextmanager
def new_lineage(path: Path) -> Iterator[LineageWriter]:
    """Write a lineage file; it appears only if the block ends without an error."""
    with new_shard(path, SCHEMA) as shard:
        yield LineageWriter(shard)


class Lineage:
    """Where each document of a store came from; one row group is in memory at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ends = np.cumsum(count_group_rows(path), dtype=np.int64)
        self._group = lru_cache(maxsize=1)(self._read)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, document: int) -> tuple[str, str]:
        """(source, id) of a document."""
        if not 0 <= document < len(self):
            raise IndexError(f"{self.path}: no document {document}; the store has {len(self):,}")
        group = int(np.searchsorted(self._ends, document, side="right"))
        table = self._group(group)
        row = document - int(self._ends[group]) + table.num_rows
        return table.column(0)[row].as_py(), table.column(1)[row].as_py()

    def _read(self, group: int) -> pa.Table:
        (table,) = read_groups(self.path, range(group, group + 1), SCHEMA.names)
        return table
