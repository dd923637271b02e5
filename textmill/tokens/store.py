"""Reads a token store: Megatron's memory-mapped pair of .bin (ids) and .idx (index) files."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.tokens.index_formats import BLOCK, Index, open_index
from textmill.tokens.mmap_advice import advise


def dtype_for(vocab: int) -> np.dtype[Any]:
    """The dtype that Megatron uses for a vocabulary of this size."""
    return np.dtype(np.uint16 if vocab < 65500 else np.int32)


@dataclass(frozen=True)
class TokenStore:
    """The memory-mapped ids of one split, or of some documents of it, and where sequences and documents start."""

    prefix: Path
    ids: NDArray[Any]
    """The token ids of these documents, concatenated."""
    index: Index
    first_document: int = 0
    """The number of the first of these documents in the index."""
    document_count: int = 0
    loss_mask: NDArray[np.uint8] | None = None
    """Conversations only: 1 for each token with loss, else 0."""
    labels: NDArray[np.int32] | None = None
    """Examples with labels only: the class of each token, -100 for none; for question-answering, the first two numbers
    are the positions of the answer's first and last token."""

    file_sizes: tuple[tuple[Path, int], ...] = ()
    """The memory-mapped files, and their bytes when they were opened."""

    def check_mapped(self) -> None:
        """Raise an error if a file has been truncated: reading beyond its end would kill the process (SIGBUS)."""
        for path, size in self.file_sizes:
            with suppress(FileNotFoundError):  # a removed file stays readable while it is mapped
                if (found := path.stat().st_size) < size:
                    raise TextmillError(
                        f"{path}: was truncated from {size:,} to {found:,} bytes while it was read; "
                        "put the file back, or make it again with: textmill tokenize WHERE --force"
                    )

    def __len__(self) -> int:
        return self.document_count

    @property
    def tokens(self) -> int:
        """The number of token ids in these documents."""
        return len(self.ids)

    @property
    def lengths(self) -> NDArray[Any]:
        """The number of tokens in each sequence."""
        begin, end = (
            int(self.index.documents[number])
            for number in (self.first_document, self.first_document + self.document_count)
        )
        return self.index.lengths[begin:end]

    def document_starts(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where these documents start in `ids`; number `len(self)` gives the end of the last one."""
        begin = self._tokens_before(np.array([self.first_document]))[0]
        starts: NDArray[np.int64] = self._tokens_before(self.first_document + documents) - begin
        return starts

    def document_lengths(self) -> NDArray[np.int64] | NDArray[np.int32]:
        """The number of tokens in each document, in memory: int32 if every document is one sequence, else int64."""
        if self._one_sequence_each():
            return np.array(self.lengths)
        lengths = np.empty(self.document_count, np.int64)
        for start in range(0, self.document_count, BLOCK):
            documents = np.arange(start, min(start + BLOCK, self.document_count) + 1, dtype=np.int64)
            lengths[start : start + BLOCK] = np.diff(self.document_starts(documents))
        return lengths

    def _one_sequence_each(self) -> bool:
        if len(self.lengths) != self.document_count:
            return False
        sequences = self.index.documents[self.first_document : self.first_document + self.document_count + 1]
        blocks = (sequences[start : start + BLOCK + 1] for start in range(0, self.document_count, BLOCK))
        return all(bool((np.diff(block) == 1).all()) for block in blocks)

    def advise(self, *, random: bool) -> None:
        """Announce how the store will be read from now on: documents in random order, or sequentially."""
        for array in (
            self.ids,
            self.loss_mask,
            self.labels,
            self.index.lengths,
            self.index.offsets,
            self.index.documents,
        ):
            if array is not None:
                advise(array, random=random)

    def slice(self, begin: int, end: int) -> TokenStore:
        """The documents from `begin` up to but not including `end`, as a view; nothing is copied."""
        edges = self.document_starts(np.array([begin, end], np.int64))
        beside: dict[str, Any] = {
            name: None if (array := getattr(self, name)) is None else array[edges[0] : edges[1]]
            for name in ("loss_mask", "labels")
        }
        first = self.first_document + begin
        return replace(
            self, ids=self.ids[edges[0] : edges[1]], first_document=first, document_count=end - begin, **beside
        )

    def _tokens_before(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        index = self.index
        sequences = np.asarray(index.documents[documents], np.int64)
        if not len(index.lengths):
            return np.zeros_like(sequences)
        inside = np.minimum(sequences, len(index.lengths) - 1)
        starts = np.asarray(index.offsets[inside], np.int64) // index.offset_divisor
        return np.where(sequences == inside, starts, index.tokens)


def open_store(prefix: Path) -> TokenStore:
    """Memory-map a store, after checking that the index and the ids belong together."""
    index_path, ids_path = store_paths(prefix)
    for path in (index_path, ids_path):
        if not path.is_file():
            raise TextmillError(f"{path}: file not found; a token store is a pair of .bin and .idx files")
    index = open_index(index_path)
    found = ids_path.stat().st_size
    expected = index.tokens * index.dtype.itemsize
    if found != expected:
        raise TextmillError(
            f"{ids_path}: has {found:,} bytes, but {index_path.name} expects {expected:,}; "
            f"the two files do not belong together"
        )
    ids = np.memmap(ids_path, index.dtype, "r") if found else np.zeros(0, index.dtype)
    mask = _open_beside(loss_mask_path(prefix), np.dtype(np.uint8), len(ids))
    labels = _open_beside(labels_path(prefix), np.dtype(np.int32), len(ids))
    beside = [path for path in (loss_mask_path(prefix), labels_path(prefix)) if path.is_file()]
    sizes = tuple((path, path.stat().st_size) for path in (index_path, ids_path, *beside))
    return TokenStore(prefix, ids, index, 0, len(index.documents) - 1, mask, labels, sizes)


def _open_beside(path: Path, dtype: np.dtype[Any], tokens: int) -> NDArray[Any] | None:
    """One number per token: a loss mask or labels; None if there is no such file."""
    if not path.is_file():
        return None
    if path.stat().st_size != tokens * dtype.itemsize:
        raise TextmillError(
            f"{path}: has {path.stat().st_size:,} bytes, but the store has {tokens:,} tokens; "
            f"this file is of another store"
        )
    return np.memmap(path, dtype, "r") if tokens else np.zeros(0, dtype)


def loss_mask_path(prefix: Path) -> Path:
    """The loss mask of a store of conversations: one byte per token."""
    return prefix.with_name(prefix.name + ".mask")


def labels_path(prefix: Path) -> Path:
    """The labels of a store of examples: one 32-bit number per token."""
    return prefix.with_name(prefix.name + ".labels")


def store_paths(prefix: Path) -> tuple[Path, Path]:
    """The .idx and .bin files of a prefix; the prefix may contain dots, so the endings are appended."""
    return prefix.with_name(prefix.name + ".idx"), prefix.with_name(prefix.name + ".bin")


def store_prefix(path: Path) -> Path:
    """The prefix of a store, given the prefix or one of its two files."""
    return path.with_name(path.name.removesuffix(".bin").removesuffix(".idx"))
