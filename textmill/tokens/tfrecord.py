"""Reads and writes TFRecord files: records with checksums of their length and their bytes, and TensorFlow's examples.

TensorFlow would be the library for it; it is larger than all that textmill needs together. An example, the message
`tf.train.Example` in a record, is nested fields:

    1: features
        1: entry             one for each feature
            1: name          "input_ids"
            2: feature
                3: list      1 bytes, 2 floats, 3 integers
                    1: values, packed
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.ranges import expand_ranges
from textmill.tokens.protobuf import DELIMITED, BrokenMessage, bytes_field, read_fields

LENGTH = struct.Struct("<Q")
CHECKSUM = struct.Struct("<I")
HEADER_BYTES = LENGTH.size + CHECKSUM.size
CRC_BLOCK = 1024
"""Bytes whose checksum is computed at a time."""
BYTES = 1
FLOATS = 2
INTEGERS = 3
"""The fields of a feature: its list of bytes, floats or 64-bit integers."""
KIND_NAMES = {BYTES: "bytes", FLOATS: "floats", INTEGERS: "integers"}


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


def masked_crc(data: bytes) -> int:
    """The checksum as TFRecord stores it: rotated, plus a constant."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) of some bytes."""
    tables = _crc_tables()
    state = 0xFFFFFFFF
    values = np.frombuffer(data, np.uint8)
    for start in range(0, len(values), CRC_BLOCK):
        block = values[start : start + CRC_BLOCK].copy()
        head = np.frombuffer(CHECKSUM.pack(state), np.uint8)[: len(block)]
        block[: len(head)] ^= head
        rest = state >> (8 * len(block)) if len(block) < CHECKSUM.size else 0
        state = rest ^ int(np.bitwise_xor.reduce(tables[np.arange(len(block) - 1, -1, -1), block]))
    return state ^ 0xFFFFFFFF


@lru_cache(maxsize=1)
def _crc_tables() -> NDArray[np.uint32]:
    """[following bytes, byte]: what a byte adds to the checksum if this many bytes follow in its block."""
    first = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = (first >> np.uint32(1)) ^ (np.uint32(0x82F63B78) * (first & np.uint32(1)))
    tables = np.empty((CRC_BLOCK, 256), np.uint32)
    tables[0] = first
    for number in range(1, CRC_BLOCK):
        before = tables[number - 1]
        tables[number] = first[before & np.uint32(255)] ^ (before >> np.uint32(8))
    return tables


@dataclass(frozen=True)
class Feature:
    """A feature before its values are decoded."""

    kind: int
    data: bytes
    """Its values as they are in the message, packed."""


def split_example(data: bytes) -> dict[str, Feature]:
    """The features of an example, by name."""
    by_name: dict[str, Feature] = {}
    for features in read_fields(data)[1].get(1, []):
        for entry in read_fields(features)[1].get(1, []):
            parts = read_fields(entry)[1]
            name = parts.get(1, [b""])[-1].decode("utf-8", "replace")
            by_name[name] = Feature(INTEGERS, b"")
            for kind, lists in read_fields(parts.get(2, [b""])[-1])[1].items():
                by_name[name] = Feature(kind, _packed_values(kind, lists[0]))
                break
    return by_name


def _packed_values(kind: int, data: bytes) -> bytes:
    """The values of a list; TensorFlow declares its lists of numbers as packed."""
    if kind == BYTES or not data:
        return data
    if data[0] != 1 << 3 | DELIMITED:
        raise BrokenMessage("a list of numbers is not packed")
    return b"".join(read_fields(data)[1].get(1, []))


def decode_varints(data: bytes) -> NDArray[np.int64]:
    """The integers of a packed list."""
    values = np.frombuffer(data, np.uint8)
    if not len(values):
        return np.zeros(0, np.int64)
    ends = np.flatnonzero(values < 128)
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])
    if not len(ends) or ends[-1] != len(values) - 1 or int((ends - starts).max()) > 9:
        raise BrokenMessage("a number is cut short")
    shifts = expand_ranges(0, ends - starts + 1) * 7
    parts = (values & np.uint8(127)).astype(np.uint64) << shifts.astype(np.uint64)
    return np.add.reduceat(parts, starts).view(np.int64)


def encode_varints(rows: NDArray[np.int64]) -> list[bytes]:
    """A packed list of integers for each row."""
    values = np.ascontiguousarray(rows, np.int64).view(np.uint64).ravel()
    limits = np.array([1 << (7 * size) for size in range(1, 10)], np.uint64)
    sizes = np.searchsorted(limits, values, side="right") + 1
    ends = np.cumsum(sizes)
    number = expand_ranges(0, sizes)
    octets = (np.repeat(values, sizes) >> (number * 7).astype(np.uint64)).astype(np.uint8) & np.uint8(127)
    octets |= (number < np.repeat(sizes, sizes) - 1).astype(np.uint8) << np.uint8(7)
    edges = [0, *ends.reshape(len(rows), -1)[:, -1].tolist()] if values.size else [0] * (len(rows) + 1)
    data = octets.tobytes()
    return [data[begin:end] for begin, end in pairwise(edges)]


def build_examples(columns: Mapping[str, NDArray[Any]]) -> list[bytes]:
    """One example for each row of the columns, which are [rows, values] of int64 or float32."""
    encoded: list[Sequence[bytes]] = []
    for name, values in columns.items():
        if np.issubdtype(values.dtype, np.integer):
            kind = INTEGERS
            lists = encode_varints(values)
        else:
            kind = FLOATS
            lists = [row.astype("<f4").tobytes() for row in values]
        key = bytes_field(1, name.encode())
        encoded.append([bytes_field(1, key + bytes_field(2, bytes_field(kind, bytes_field(1, one)))) for one in lists])
    return [bytes_field(1, b"".join(parts)) for parts in zip(*encoded, strict=True)]
