"""A token store: Megatron's pair of .bin (ids) and .idx (index) files, memory-mapped, and how it is written.

Megatron wrote two formats of the index, MMIDIDX ("mmap") and before it TNTIDX ("lazy", from fairseq); both are read and
written. Beside a store there may be one number per token: a loss mask or labels.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.storage.files import fsync_path

IndexFormat = Literal["mmap", "lazy"]
MMAP = b"MMIDIDX\x00\x00"
MMAP_HEADER = struct.Struct("<9sQBQQ")
LAZY = b"TNTIDX\x00\x00"
LAZY_HEADER = struct.Struct("<8s5Q")
DTYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
BLOCK = 1 << 20
"""Entries processed at a time when an index is written or checked."""


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
        begin, end = self.index.documents[[self.first_document, self.first_document + self.document_count]]
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
    ids = _memory_map(ids_path, index.dtype, 0, index.tokens)
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
    return _memory_map(path, dtype, 0, tokens)


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


@dataclass(frozen=True)
class Index:
    """Where sequences and documents start, as arrays memory-mapped from the file."""

    path: Path
    dtype: np.dtype[Any]
    lengths: NDArray[Any]
    """The number of tokens in each sequence."""
    offsets: NDArray[np.int64]
    """Where each sequence starts, in bytes (mmap) or in tokens (lazy)."""
    offset_divisor: int
    """Divide an offset by this to get tokens: the bytes per token (mmap), or 1 (lazy)."""
    documents: NDArray[np.int64]
    """The number of sequences before each document; the last entry is the number of all sequences."""

    @property
    def tokens(self) -> int:
        """The number of token ids; computed from the last entry, so that opening takes the same time for any length."""
        if not len(self.lengths):
            return 0
        return int(self.offsets[len(self.lengths) - 1]) // self.offset_divisor + int(self.lengths[-1])


def open_index(path: Path) -> Index:
    """Memory-map an index of either format; raises an error for truncated files and other formats."""
    with open(path, "rb") as stream:
        head = stream.read(LAZY_HEADER.size)
    if head.startswith(MMAP) and len(head) >= MMAP_HEADER.size:
        index = _open_mmap(path, head)
    elif head.startswith(LAZY) and len(head) >= LAZY_HEADER.size:
        index = _open_lazy(path, head)
    else:
        raise TextmillError(f"{path}: not a token index (it starts with {head[:9]!r}, not with {MMAP!r} or {LAZY!r})")
    begins = int(index.documents[0])
    ends = int(index.documents[-1])
    if begins != 0 or ends != len(index.lengths):
        raise TextmillError(
            f"{path}: the documents cover sequences {begins:,} to {ends:,} of {len(index.lengths):,}; "
            f"the file is damaged"
        )
    return index


def _open_mmap(path: Path, head: bytes) -> Index:
    _, version, code, sequences, entries = MMAP_HEADER.unpack(head[: MMAP_HEADER.size])
    dtype = _dtype(path, version, code)
    size = MMAP_HEADER.size + 12 * sequences + 8 * entries
    _check_size(path, sequences, (size, size + sequences))  # newer Megatron files end with a mode byte per sequence
    lengths = _memory_map(path, np.int32, MMAP_HEADER.size, sequences)
    offsets = _memory_map(path, np.int64, MMAP_HEADER.size + 4 * sequences, sequences)
    documents = _memory_map(path, np.int64, MMAP_HEADER.size + 12 * sequences, entries)
    return Index(path, dtype, lengths, offsets, dtype.itemsize, documents if entries else np.zeros(1, np.int64))


def _open_lazy(path: Path, head: bytes) -> Index:
    _, version, code, width, items, sizes = LAZY_HEADER.unpack(head)
    dtype = _dtype(path, version, code)
    if width != dtype.itemsize or sizes != items:
        raise TextmillError(
            f"{path}: {sizes:,} sizes for {items:,} items of {width} bytes; "
            f"only one-dimensional items of {dtype} are supported"
        )
    without_documents = LAZY_HEADER.size + 8 * (2 * (items + 1) + sizes)
    has_documents = path.stat().st_size > without_documents  # files of fairseq itself have none
    begin = LAZY_HEADER.size + 8 * has_documents
    entries = int(np.fromfile(path, "<u8", 1, offset=LAZY_HEADER.size)[0]) if has_documents else 0
    _check_size(path, items, (without_documents + 8 * (1 + entries) if has_documents else without_documents,))
    offsets = _memory_map(path, np.int64, begin + 8 * (items + 1), items + 1)
    lengths = _memory_map(path, np.int64, begin + 16 * (items + 1), sizes)
    documents = _memory_map(path, np.int64, begin + 16 * (items + 1) + 8 * sizes, entries)
    return Index(path, dtype, lengths, offsets, 1, documents if entries else np.arange(items + 1, dtype=np.int64))


def _dtype(path: Path, version: int, code: int) -> np.dtype[Any]:
    if version != 1 or code not in DTYPES:
        raise TextmillError(
            f"{path}: version {version} with dtype code {code}; supported are version 1 and codes {sorted(DTYPES)}"
        )
    dtype: np.dtype[Any] = np.dtype(DTYPES[code])
    return dtype


def _check_size(path: Path, sequences: int, allowed: tuple[int, ...]) -> None:
    if (size := path.stat().st_size) not in allowed:
        raise TextmillError(
            f"{path}: has {size:,} bytes, expected {allowed[0]:,} for {sequences:,} sequences; "
            f"the file is truncated or damaged"
        )


def _memory_map(path: Path, dtype: Any, offset: int, count: int) -> NDArray[Any]:
    return np.memmap(path, dtype, "r", offset, (count,)) if count else np.zeros(0, dtype)


def find_index_errors(index: Index) -> list[str]:
    """Errors inside an index that opens: offsets that do not match the lengths, documents out of order."""
    position = 0
    for ends, sizes in _cumulative_lengths(index.lengths):
        found = index.offsets[position : position + len(sizes)] // index.offset_divisor
        if wrong := np.flatnonzero((found != ends - sizes) | (sizes < 0)).tolist():
            return [f"{index.path.name}: sequence {position + wrong[0]:,} does not start where the previous one ends"]
        position += len(sizes)
    for start in range(0, len(index.documents), BLOCK):
        steps = np.diff(index.documents[start : start + BLOCK + 1])
        if len(steps) and int(steps.min()) < 0:
            return [f"{index.path.name}: document {start + int(steps.argmin()):,} ends before it starts"]
    return []


class StoreWriter:
    """Appends documents to a store; lengths and document ends go to temporary files until the index is written."""

    def __init__(
        self, prefix: Path, dtype: np.dtype[Any], index_format: IndexFormat = "mmap", has_loss_mask: bool = False
    ) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        self.index_format = index_format
        if self.dtype not in CODES:
            raise TextmillError(
                f"{prefix}: token ids of dtype {dtype} cannot be stored; the format knows {', '.join(map(str, CODES))}"
            )
        self.largest_id = int(np.iinfo(self.dtype).max)
        self.sequences = 0
        self.documents = 0
        self._ids = open(self._temporary(".bin"), "wb")
        self._lengths = open(self._temporary(".lengths"), "wb")
        self._documents = open(self._temporary(".documents"), "wb")
        self._mask = open(self._temporary(".mask"), "wb") if has_loss_mask else None

    def add(self, documents: Sequence[Any]) -> None:
        """Add documents of one sequence each."""
        if len(documents):
            lengths = np.fromiter((len(document) for document in documents), np.int64, len(documents))
            self.add_flat(np.concatenate([np.asarray(document, np.int64) for document in documents]), lengths)

    def add_flat(
        self,
        ids: NDArray[Any],
        lengths: NDArray[Any],
        sequences: NDArray[Any] | None = None,
        loss_mask: NDArray[np.uint8] | None = None,
    ) -> None:
        """Add documents as one array of ids and the lengths of their sequences.

        `sequences`: how many sequences each document has (default: one each).
        `loss_mask`: 1 for each token with loss; required if the store has a loss mask.
        """
        if len(ids) and (int(ids.max()) > self.largest_id or int(ids.min()) < 0):
            worst = int(ids.max()) if int(ids.max()) > self.largest_id else int(ids.min())
            raise TextmillError(
                f"{self.prefix}: token id {worst} does not fit into {self.dtype}; "
                f"the store was made for a smaller vocabulary"
            )
        if len(lengths) and int(np.max(lengths)) > np.iinfo(np.int32).max:
            raise TextmillError(
                f"{self.prefix}: a document has {int(np.max(lengths)):,} tokens; "
                f"the format allows 2,147,483,647 at most"
            )
        counts = np.ones(len(lengths), np.int64) if sequences is None else np.asarray(sequences, np.int64)
        if int(np.sum(lengths)) != len(ids) or int(counts.sum()) != len(lengths):
            raise ValueError(
                f"{len(ids)} ids but lengths sum to {int(np.sum(lengths))}; "
                f"{len(lengths)} sequences but counts sum to {int(counts.sum())}"
            )
        self._add_mask(loss_mask, len(ids))
        self._ids.write(np.ascontiguousarray(ids.astype(self.dtype, copy=False)).data)
        self._lengths.write(np.asarray(lengths, np.int32).tobytes())
        self._documents.write((self.sequences + np.cumsum(counts)).tobytes())
        self.sequences += len(lengths)
        self.documents += len(counts)

    def _add_mask(self, loss_mask: NDArray[np.uint8] | None, tokens: int) -> None:
        if (loss_mask is None) != (self._mask is None) or (loss_mask is not None and len(loss_mask) != tokens):
            found = 0 if loss_mask is None else len(loss_mask)
            raise ValueError(f"{self.prefix}: a loss mask of {found} for {tokens} ids")
        if self._mask is not None and loss_mask is not None:
            self._mask.write(np.ascontiguousarray(loss_mask, np.uint8).data)

    def add_store(self, store: TokenStore) -> None:
        """Add all documents of another store, unchanged, in blocks."""
        if store.ids.dtype != self.dtype:
            raise TextmillError(
                f"{store.prefix}: has {store.ids.dtype} ids and {self.prefix} has {self.dtype}; "
                f"only stores of the same dtype can be joined"
            )
        if (store.loss_mask is None) != (self._mask is None):
            raise TextmillError(
                f"{store.prefix}: a store has either conversations or plain text, not both; "
                f"join stores of the same kind"
            )
        for begin in range(0, len(store), BLOCK):
            part = store.slice(begin, min(begin + BLOCK, len(store)))
            ends = part.index.documents[part.first_document : part.first_document + len(part) + 1]
            self.add_flat(part.ids, part.lengths, np.diff(ends), part.loss_mask)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for stream in (self._ids, self._lengths, self._documents, self._mask):
                if stream is not None:
                    stream.close()
            if kind is None:
                self._write_index()
                index_path, ids_path = store_paths(self.prefix)
                if self._mask is not None:
                    fsync_path(self._temporary(".mask"))
                    os.replace(self._temporary(".mask"), loss_mask_path(self.prefix))
                # The ids first: if the index exists, the pair is complete.
                os.replace(self._temporary(".bin"), ids_path)
                os.replace(self._temporary(".idx"), index_path)
        finally:
            for suffix in (".bin", ".lengths", ".documents", ".idx", ".mask"):
                self._temporary(suffix).unlink(missing_ok=True)

    def _write_index(self) -> None:
        fsync_path(self._temporary(".bin"))
        lengths = _memory_map(self._temporary(".lengths"), np.int32, 0, self.sequences)
        documents = _memory_map(self._temporary(".documents"), np.int64, 0, self.documents)
        with open(self._temporary(".idx"), "wb") as index:
            index.writelines(index_blocks(self.index_format, self.dtype, lengths, documents))
        fsync_path(self._temporary(".idx"))

    def _temporary(self, suffix: str) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}.tmp-{os.getpid()}{suffix}")


def index_blocks(
    index_format: IndexFormat, dtype: np.dtype[Any], lengths: NDArray[np.int32], documents: NDArray[np.int64]
) -> Iterator[bytes]:
    """The bytes of an index, in blocks; `documents` counts the sequences up to the end of each document."""
    sequences = len(lengths)
    entries = len(documents) + 1
    if index_format == "mmap":
        yield MMAP_HEADER.pack(MMAP, 1, CODES[dtype], sequences, entries)
        for start in range(0, sequences, BLOCK):
            yield lengths[start : start + BLOCK].astype("<i4").tobytes()
        for ends, sizes in _cumulative_lengths(lengths):
            yield ((ends - sizes) * dtype.itemsize).astype("<i8").tobytes()
    else:
        yield LAZY_HEADER.pack(LAZY, 1, CODES[dtype], dtype.itemsize, sequences, sequences) + struct.pack("<Q", entries)
        for start in range(0, sequences + 1, BLOCK):
            yield np.arange(start, min(start + BLOCK, sequences + 1), dtype="<i8").tobytes()
        yield bytes(8)
        for ends, _ in _cumulative_lengths(lengths):
            yield ends.astype("<i8").tobytes()
        for start in range(0, sequences, BLOCK):
            yield lengths[start : start + BLOCK].astype("<i8").tobytes()
    yield bytes(8)
    for start in range(0, len(documents), BLOCK):
        yield documents[start : start + BLOCK].astype("<i8").tobytes()


def _cumulative_lengths(lengths: NDArray[Any]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(tokens up to the end of each sequence, tokens of the sequence), in blocks."""
    before = 0
    for start in range(0, len(lengths), BLOCK):
        sizes = lengths[start : start + BLOCK].astype(np.int64)
        ends = before + np.cumsum(sizes)
        before = int(ends[-1])
        yield ends, sizes


def advise(array: NDArray[Any], *, random: bool) -> None:
    """Announce random or sequential reads of a memory-mapped array; no effect on an array in memory.

    The operating system's read-ahead speeds up reading in order and slows down random access.
    """
    base: Any = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = getattr(base, "base", None)
    if base is not None and hasattr(mmap, "MADV_RANDOM"):
        base.madvise(mmap.MADV_RANDOM if random else mmap.MADV_NORMAL)
