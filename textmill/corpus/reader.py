"""A prepared corpus as one lazy sequence: corpus[i] is a Document, whatever its source was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from textmill.corpus.document import SPLITS, Document, Split
from textmill.corpus.shards import open_shard, read_documents, shards_of
from textmill.storage.stages import open_manifest

GROUPS_HELD = 4


class Corpus(Sequence[Document]):
    """Documents by position, read a row group at a time when they are asked for."""

    def __init__(self, shards: list[Path]) -> None:
        self.shards = shards
        self._groups: list[tuple[Path, int]] = []
        rows = []
        for path in shards:
            with open_shard(path) as shard:
                for group in range(shard.num_row_groups):
                    self._groups.append((path, group))
                    rows.append(shard.metadata.row_group(group).num_rows)
        self._ends: NDArray[np.int64] = np.cumsum(rows, dtype=np.int64)
        self._rows = lru_cache(maxsize=GROUPS_HELD)(self._read)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"document {index} of {len(self):,}")
        group = int(np.searchsorted(self._ends, place, side="right"))
        row = place - (int(self._ends[group - 1]) if group else 0)
        return Document(*(column[row].as_py() for column in self._rows(group)))

    def __iter__(self) -> Iterator[Document]:
        for path in self.shards:
            yield from read_documents(path)

    def _read(self, group: int) -> list[Any]:
        path, number = self._groups[group]
        with open_shard(path) as shard:
            table = shard.read_row_group(number, columns=["text", "source", "id"], use_threads=False)
        return [table.column(name) for name in ("text", "source", "id")]


def open_corpus(folder: Path | str, split: Split | None = None) -> Corpus:
    """The prepared corpus in a folder: one split of it, or all of them one after the other."""
    folder = Path(folder)
    open_manifest(folder)
    return Corpus([path for one in ([split] if split else SPLITS) for path in shards_of(folder, one)])
