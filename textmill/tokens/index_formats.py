"""Reads and writes the two index formats of token stores: Megatron's MMIDIDX (mmap) and its older TNTIDX (lazy)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError

IndexFormat = Literal["mmap", "lazy"]
MMAP = b"MMIDIDX\x00\x00"
LAZY = b"TNTIDX\x00\x00"
MMAP_HEADER = struct.Struct("<9sQBQQ")
LAZY_HEADER = struct.Struct("<8s5Q")
DTYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
BLOCK = 1 << 20
"""Entries processed at a time when an index is written or checked."""


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
        return (
            int(self.offsets[len(self.lengths) - 1]) // self.offset_divisor + int(self.lengths[-1])
            if len(self.lengths)
            else 0
        )


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
