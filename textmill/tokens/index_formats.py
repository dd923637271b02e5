"""The two index formats of a token store: Megatron's memory-mapped MMIDIDX, and the older TNTIDX of its lazy and cached readers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError

Format = Literal["mmap", "lazy"]
MMAP, LAZY = b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00"
MMAP_HEADER = struct.Struct("<9sQBQQ")
LAZY_HEADER = struct.Struct("<8s5Q")
DTYPES: dict[int, Any] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
BLOCK = 1 << 20
"""Entries at a time when an index is written or proved."""


@dataclass(frozen=True)
class Index:
    """Where sequences and documents stand, as arrays mapped from the file."""

    path: Path
    dtype: np.dtype[Any]
    lengths: NDArray[Any]
    """Tokens in each sequence."""
    offsets: NDArray[np.int64]
    """Where each sequence begins, in units of `unit` tokens' bytes or of tokens."""
    unit: int
    """What an offset is divided by to count tokens: the item's size in bytes, or 1."""
    documents: NDArray[np.int64]
    """Sequences before each document, and their number at the end."""

    @property
    def tokens(self) -> int:
        """Token ids that the index speaks of; from its last entry, so that opening costs the same however long it is."""
        return int(self.offsets[len(self.lengths) - 1]) // self.unit + int(self.lengths[-1]) if len(self.lengths) else 0


def open_index(path: Path) -> Index:
    """Map an index of either format; a cut or foreign file is named."""
    with open(path, "rb") as stream:
        head = stream.read(LAZY_HEADER.size)
    if head.startswith(MMAP) and len(head) >= MMAP_HEADER.size:
        index = _open_mmap(path, head)
    elif head.startswith(LAZY) and len(head) >= LAZY_HEADER.size:
        index = _open_lazy(path, head)
    else:
        raise TextmillError(f"{path}: not a token index (it begins with {head[:9]!r}, not {MMAP!r} or {LAZY!r})")
    begins, ends = int(index.documents[0]), int(index.documents[-1])
    if begins != 0 or ends != len(index.lengths):
        raise TextmillError(
            f"{path}: its documents cover sequences {begins:,} to {ends:,} of {len(index.lengths):,}; the file is damaged"
        )
    return index


def _open_mmap(path: Path, head: bytes) -> Index:
    _, version, code, sequences, entries = MMAP_HEADER.unpack(head[: MMAP_HEADER.size])
    dtype = _dtype(path, version, code)
    whole = MMAP_HEADER.size + 12 * sequences + 8 * entries
    _check_size(path, sequences, (whole, whole + sequences))  # later Megatron files end with a mode byte a sequence
    lengths = _mapped(path, np.int32, MMAP_HEADER.size, sequences)
    offsets = _mapped(path, np.int64, MMAP_HEADER.size + 4 * sequences, sequences)
    documents = _mapped(path, np.int64, MMAP_HEADER.size + 12 * sequences, entries)
    return Index(path, dtype, lengths, offsets, dtype.itemsize, documents if entries else np.zeros(1, np.int64))


def _open_lazy(path: Path, head: bytes) -> Index:
    _, version, code, width, items, sizes = LAZY_HEADER.unpack(head)
    dtype = _dtype(path, version, code)
    if width != dtype.itemsize or sizes != items:
        raise TextmillError(
            f"{path}: {sizes:,} sizes for {items:,} items of {width} bytes; only one-dimensional items of {dtype} are read"
        )
    bare = LAZY_HEADER.size + 8 * (2 * (items + 1) + sizes)
    counted = path.stat().st_size > bare  # fairseq's own files have no documents
    begin = LAZY_HEADER.size + 8 * counted
    entries = int(np.fromfile(path, "<u8", 1, offset=LAZY_HEADER.size)[0]) if counted else 0
    _check_size(path, items, (bare + 8 * (1 + entries) if counted else bare,))
    offsets = _mapped(path, np.int64, begin + 8 * (items + 1), items + 1)
    lengths = _mapped(path, np.int64, begin + 16 * (items + 1), sizes)
    documents = _mapped(path, np.int64, begin + 16 * (items + 1) + 8 * sizes, entries)
    return Index(path, dtype, lengths, offsets, 1, documents if entries else np.arange(items + 1, dtype=np.int64))


def _dtype(path: Path, version: int, code: int) -> np.dtype[Any]:
    if version != 1 or code not in DTYPES:
        raise TextmillError(
            f"{path}: version {version} with dtype code {code}; version 1 and codes {sorted(DTYPES)} are read"
        )
    dtype: np.dtype[Any] = np.dtype(DTYPES[code])
    return dtype


def _check_size(path: Path, sequences: int, wanted: tuple[int, ...]) -> None:
    if (size := path.stat().st_size) not in wanted:
        raise TextmillError(
            f"{path}: {size:,} bytes instead of {wanted[0]:,} for {sequences:,} sequences; the file is cut or damaged"
        )


def _mapped(path: Path, dtype: Any, offset: int, count: int) -> NDArray[Any]:
    return np.memmap(path, dtype, "r", offset, (count,)) if count else np.zeros(0, dtype)


def index_blocks(
    form: Format, dtype: np.dtype[Any], lengths: NDArray[np.int32], documents: NDArray[np.int64]
) -> Iterator[bytes]:
    """The bytes of an index, in blocks: from mapped lengths, and mapped counts of sequences up to each document's end."""
    sequences, entries = len(lengths), len(documents) + 1
    if form == "mmap":
        yield MMAP_HEADER.pack(MMAP, 1, CODES[dtype], sequences, entries)
        for start in range(0, sequences, BLOCK):
            yield lengths[start : start + BLOCK].astype("<i4").tobytes()
        for ends, sizes in _running(lengths):
            yield ((ends - sizes) * dtype.itemsize).astype("<i8").tobytes()
    else:
        yield LAZY_HEADER.pack(LAZY, 1, CODES[dtype], dtype.itemsize, sequences, sequences) + struct.pack("<Q", entries)
        for start in range(0, sequences + 1, BLOCK):
            yield np.arange(start, min(start + BLOCK, sequences + 1), dtype="<i8").tobytes()
        yield bytes(8)
        for ends, _ in _running(lengths):
            yield ends.astype("<i8").tobytes()
        for start in range(0, sequences, BLOCK):
            yield lengths[start : start + BLOCK].astype("<i8").tobytes()
    yield bytes(8)
    for start in range(0, len(documents), BLOCK):
        yield documents[start : start + BLOCK].astype("<i8").tobytes()


def _running(lengths: NDArray[Any]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(tokens up to the end of each sequence, its own tokens), in blocks."""
    before = 0
    for start in range(0, len(lengths), BLOCK):
        sizes = lengths[start : start + BLOCK].astype(np.int64)
        ends = before + np.cumsum(sizes)
        before = int(ends[-1])
        yield ends, sizes


def faults_in_index(index: Index) -> list[str]:
    """What is wrong inside an index that opens: offsets that do not follow from the lengths, documents out of order."""
    place = 0
    for ends, sizes in _running(index.lengths):
        found = index.offsets[place : place + len(sizes)] // index.unit
        if wrong := np.flatnonzero((found != ends - sizes) | (sizes < 0)).tolist():
            return [f"{index.path.name}: sequence {place + wrong[0]:,} does not begin where the one before it ends"]
        place += len(sizes)
    for start in range(0, len(index.documents), BLOCK):
        steps = np.diff(index.documents[start : start + BLOCK + 1])
        if len(steps) and int(steps.min()) < 0:
            return [f"{index.path.name}: document {start + int(steps.argmin()):,} ends before it begins"]
    return []
