"""The size of a compressed file's content, from what the file says of it."""

from __future__ import annotations

import struct
from pathlib import Path

XZ_FOOTER = struct.Struct("<4xI2x2s")
"""Checksum, size of the index in words less one, flags, magic bytes."""
GZ_SMALL = 1 << 28
"""Above this size of a file, the size that gzip stores, modulo 2**32, may be that of a larger content."""


def content_size(address: str) -> int | None:
    """Bytes of a local file's content when decompressed; None if the file does not say it, or is damaged."""
    path = Path(address)
    try:
        size = path.stat().st_size
        if path.suffix == ".gz" and 18 < size < GZ_SMALL:
            found = int.from_bytes(_read_end(path, size, 4), "little")
            return found if found >= size // 2 else None  # several files in one, of which this is the last one's size
        return _xz_size(path, size) if path.suffix == ".xz" and size > XZ_FOOTER.size else None
    except (OSError, ValueError):
        return None


def _xz_size(path: Path, size: int) -> int | None:
    """The sum over all blocks, from the index before the footer; header and footer have the same size."""
    words, magic = XZ_FOOTER.unpack(_read_end(path, size, XZ_FOOTER.size))
    length = (words + 1) * 4
    if magic != b"YZ" or length > size:
        return None
    index = _read_end(path, size, XZ_FOOTER.size + length)[:length]
    numbers = []
    position = 1
    count, position = _read_number(index, position)
    for _ in range(2 * min(count, length)):
        number, position = _read_number(index, position)
        numbers.append(number)
    blocks = sum(-(-stored // 4) * 4 for stored in numbers[::2])
    # Of several streams in one file, this index is only that of the last one.
    return sum(numbers[1::2]) if 2 * XZ_FOOTER.size + blocks + length == size else None


def _read_number(data: bytes, position: int) -> tuple[int, int]:
    """A number in groups of seven bits, the lowest first, and the position after it."""
    number = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise ValueError("the index ends too early")
        byte = data[position]
        number |= (byte & 127) << shift
        position = position + 1
        shift = shift + 7
        if byte < 128:
            return number, position


def _read_end(path: Path, size: int, count: int) -> bytes:
    with path.open("rb") as stream:
        stream.seek(size - count)
        return stream.read(count)
