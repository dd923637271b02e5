"""Reads and writes TFRecord files: records with a checksum (masked CRC-32C) of their length and of their bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError

LENGTH = struct.Struct("<Q")
CHECKSUM = struct.Struct("<I")
HEADER_BYTES = LENGTH.size + CHECKSUM.size
CRC_BLOCK = 1024
"""Bytes whose checksum is computed at a time."""
_POLYNOMIAL = 0x82F63B78
_ONES = 0xFFFFFFFF
_MASK_DELTA = 0xA282EAD8


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of some bytes."""
    tables = _crc_tables()
    state = _ONES
    values = np.frombuffer(data, np.uint8)
    for start in range(0, len(values), CRC_BLOCK):
        block = values[start : start + CRC_BLOCK].copy()
        head = np.frombuffer(CHECKSUM.pack(state), np.uint8)[: len(block)]
        block[: len(head)] ^= head
        rest = state >> (8 * len(block)) if len(block) < CHECKSUM.size else 0
        state = rest ^ int(np.bitwise_xor.reduce(tables[np.arange(len(block) - 1, -1, -1), block]))
    return state ^ _ONES


def masked_crc(data: bytes) -> int:
    """The checksum as TFRecord stores it: rotated, plus a constant."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & _ONES


@lru_cache(maxsize=1)
def _crc_tables() -> NDArray[np.uint32]:
    """[following bytes, byte]: what a byte adds to the checksum if this many bytes follow in its block."""
    first = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = (first >> np.uint32(1)) ^ (np.uint32(_POLYNOMIAL) * (first & np.uint32(1)))
    tables = np.empty((CRC_BLOCK, 256), np.uint32)
    tables[0] = first
    for number in range(1, CRC_BLOCK):
        before = tables[number - 1]
        tables[number] = first[before & np.uint32(255)] ^ (before >> np.uint32(8))
    return tables


def is_tfrecord(path: Path) -> bool:
    """Whether a file starts with the header of a record."""
    with open(path, "rb") as stream:
        head = stream.read(HEADER_BYTES)
    return len(head) == HEADER_BYTES and masked_crc(head[: LENGTH.size]) == CHECKSUM.unpack(head[LENGTH.size :])[0]


def read_records(path: Path) -> Iterator[bytes]:
    """The records of a file; raises an error that names the record if it is damaged or truncated."""
    with open(path, "rb") as stream:
        for number, length in enumerate(_read_lengths(path, stream)):
            data = stream.read(length)
            if masked_crc(data) != CHECKSUM.unpack(stream.read(CHECKSUM.size))[0]:
                raise TextmillError(
                    f"{path}: record {number:,} is damaged (its checksum does not match); copy or make the file again"
                )
            yield data


def count_records(path: Path) -> int:
    """The number of records; only their headers are read."""
    with open(path, "rb") as stream:
        count = 0
        for length in _read_lengths(path, stream):
            stream.seek(length + CHECKSUM.size, 1)
            count += 1
    return count


def _read_lengths(path: Path, stream: BinaryIO) -> Iterator[int]:
    """The length of each record, after its header; the caller moves the stream past the record."""
    size = path.stat().st_size
    number = 0
    while head := stream.read(HEADER_BYTES):
        known = len(head) == HEADER_BYTES
        if known and masked_crc(head[: LENGTH.size]) != CHECKSUM.unpack(head[LENGTH.size :])[0]:
            raise TextmillError(
                f"{path}: record {number:,} is damaged (the checksum of its length does not match); "
                f"copy or make the file again; a compressed file must be unpacked first"
            )
        length = int(LENGTH.unpack(head[: LENGTH.size])[0]) if known else 0
        if not known or stream.tell() + length + CHECKSUM.size > size:
            raise TextmillError(f"{path}: is truncated in record {number:,}; copy or make the file again")
        yield length
        number += 1


def write_records(stream: BinaryIO, records: Iterable[bytes]) -> None:
    """Append records to a stream."""
    for data in records:
        length = LENGTH.pack(len(data))
        stream.write(length + CHECKSUM.pack(masked_crc(length)) + data + CHECKSUM.pack(masked_crc(data)))
