"""The token store: Megatron's memory-mapped .bin/.idx pair, read in place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.tokens.index_formats import BLOCK, Index, open_index
from textmill.tokens.mmap_advice import expect


def dtype_for(vocab: int) -> np.dtype[Any]:
    """The dtype Megatron chooses for a vocabulary."""
    return np.dtype(np.uint16 if vocab < 65500 else np.int32)


@dataclass(frozen=True)
class TokenStore:
    """One split, or a run of documents of it: memory-mapped ids and where each sequence and document ends."""

    prefix: Path
    ids: NDArray[Any]
    """The token ids of these documents, one sequence after the other."""
    index: Index
    first: int = 0
    """The first document of these, in the index."""
    count: int = 0
    """How many documents these are."""
    asked: NDArray[np.uint8] | None = None
    """Of conversations: 1 for each token that bears loss."""

    def __len__(self) -> int:
        return self.count

    @property
    def tokens(self) -> int:
        """Token ids in these documents."""
        return len(self.ids)

    @property
    def lengths(self) -> NDArray[Any]:
        """Tokens in each sequence."""
        begin, end = (int(self.index.documents[place]) for place in (self.first, self.first + self.count))
        return self.index.lengths[begin:end]

    def borders(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where documents begin in `ids`; `len(self)` is where the last one ends."""
        begin = self._tokens_before(np.array([self.first]))[0]
        borders: NDArray[np.int64] = self._tokens_before(self.first + places) - begin
        return borders

    def sizes(self) -> NDArray[np.int64] | NDArray[np.int32]:
        """Tokens in each document, in memory: four bytes a document where they are one sequence each."""
        if self._one_sequence_each():
            return np.array(self.lengths)
        sizes = np.empty(self.count, np.int64)
        for start in range(0, self.count, BLOCK):
            places = np.arange(start, min(start + BLOCK, self.count) + 1, dtype=np.int64)
            sizes[start : start + BLOCK] = np.diff(self.borders(places))
        return sizes

    def _one_sequence_each(self) -> bool:
        if len(self.lengths) != self.count:
            return False
        borders = self.index.documents[self.first : self.first + self.count + 1]
        blocks = (borders[start : start + BLOCK + 1] for start in range(0, self.count, BLOCK))
        return all(bool((np.diff(block) == 1).all()) for block in blocks)

    def expect(self, *, scattered: bool) -> None:
        """Say how it will be read from now on: document by document all over it, or in order."""
        for array in (self.ids, self.asked, self.index.lengths, self.index.offsets, self.index.documents):
            if array is not None:
                expect(array, scattered=scattered)

    def part(self, begin: int, end: int) -> TokenStore:
        """The documents from `begin` to before `end`, as a store of their own; nothing is copied."""
        edges = self.borders(np.array([begin, end], np.int64))
        asked = None if self.asked is None else self.asked[edges[0] : edges[1]]
        return TokenStore(
            self.prefix, self.ids[edges[0] : edges[1]], self.index, self.first + begin, end - begin, asked
        )

    def _tokens_before(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        index = self.index
        sequences = np.asarray(index.documents[documents], np.int64)
        if not len(index.lengths):
            return np.zeros_like(sequences)
        inside = np.minimum(sequences, len(index.lengths) - 1)
        starts = np.asarray(index.offsets[inside], np.int64) // index.unit
        return np.where(sequences == inside, starts, index.tokens)


def open_store(prefix: Path) -> TokenStore:
    """Map a store, after checking that the index and the ids fit together."""
    index_path, ids_path = paths_of(prefix)
    for path in (index_path, ids_path):
        if not path.is_file():
            raise TextmillError(f"{path}: no such file; a token store is a pair of .bin and .idx")
    index = open_index(index_path)
    found, wanted = ids_path.stat().st_size, index.tokens * index.dtype.itemsize
    if found != wanted:
        raise TextmillError(f"{ids_path}: {found:,} bytes instead of {wanted:,}; it is not the index's pair")
    ids = np.memmap(ids_path, index.dtype, "r") if found else np.zeros(0, index.dtype)
    return TokenStore(prefix, ids, index, 0, len(index.documents) - 1, _open_mask(mask_path(prefix), len(ids)))


def _open_mask(path: Path, tokens: int) -> NDArray[np.uint8] | None:
    if not path.is_file():
        return None
    if path.stat().st_size != tokens:
        raise TextmillError(f"{path}: {path.stat().st_size:,} bytes for {tokens:,} tokens; it is not the store's mask")
    return np.memmap(path, np.uint8, "r") if tokens else np.zeros(0, np.uint8)


def mask_path(prefix: Path) -> Path:
    """Where it stands which tokens of a store of conversations bear loss: a byte a token."""
    return prefix.with_name(prefix.name + ".mask")


def paths_of(prefix: Path) -> tuple[Path, Path]:
    """The index and the ids of a prefix; a name may hold dots, so no suffix is replaced."""
    return prefix.with_name(prefix.name + ".idx"), prefix.with_name(prefix.name + ".bin")


def prefix_of(path: Path) -> Path:
    """A store's prefix, when one of its two files was named."""
    return path.with_name(path.name.removesuffix(".bin").removesuffix(".idx"))
