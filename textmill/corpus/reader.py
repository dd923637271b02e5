"""Read a prepared corpus as one lazy sequence of documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from textmill.corpus.document import SPLITS, Document, Split
from textmill.corpus.shards import list_shards, open_shard, read_documents
from textmill.storage.stages import open_manifest

CACHED_GROUPS = 4
"""Row groups kept in memory."""


class Corpus(Sequence[Document]):
    """Documents by position; a row group is read when it is first needed."""

    def __init__(self, shards: list[Path]) -> None:
        self.shards = shards
        self._groups: list[tuple[Path, int]] = []
        rows = []
        for path in shards:
            with open_shard(path) as shard:
                for group in range(shard.num_row_groups):
                    self._groups.append((path, group))
                    rows.append(shard.metadata.row_group(group).num_rows)
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
        with open_shard(path) as shard:
            table = shard.read_row_group(number, columns=["text", "source", "id"], use_threads=False)
        return [table.column(name) for name in ("text", "source", "id")]


def open_corpus(folder: Path | str, split: Split | None = None) -> Corpus:
    """Open the prepared corpus in a folder: one split, or all splits in order."""
    folder = Path(folder)
    open_manifest(folder, "prepare")
    return Corpus([path for name in ([split] if split else SPLITS) for path in list_shards(folder, name)])
