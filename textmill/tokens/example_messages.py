"""Reads and writes tf.train.Example messages (protocol buffers) of integers and floats, many at a time.

An Example is nested length-delimited fields, each a tag, a length and bytes:

    1: features
        1: entry             one for each feature
            1: name          "input_ids"
            2: feature
                3: list      1 bytes, 2 floats, 3 integers
                    1: values, packed
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.ranges import expand_ranges

BYTES = 1
FLOATS = 2
INTEGERS = 3
"""The fields of a Feature: its list of bytes, floats or 64-bit integers."""
KIND_NAMES = {BYTES: "bytes", FLOATS: "floats", INTEGERS: "integers"}
_VARINT = 0
_LENGTH_DELIMITED = 2
_FIXED32 = 5
_FIXED64 = 1
_PACKED = 1 << 3 | _LENGTH_DELIMITED
"""The tag of field 1 with its values in one block."""


class BrokenMessage(ValueError):
    """Bytes that are not a message."""


@dataclass(frozen=True)
class Feature:
    """A feature before its values are decoded."""

    kind: int
    data: bytes
    """Its values as they are in the message, packed."""


def split_example(data: bytes) -> dict[str, Feature]:
    """The features of an Example, by name."""
    by_name: dict[str, Feature] = {}
    for number, features in _fields(data):
        if number != 1:
            continue
        for entry_number, entry in _fields(features):
            if entry_number == 1:
                parts = dict(_fields(entry))
                name = parts.get(1, b"").decode("utf-8", "replace")
                by_name[name] = _feature_of(parts.get(2, b""))
    return by_name


def _feature_of(data: bytes) -> Feature:
    for kind, values in _fields(data):
        return Feature(kind, _packed_values(kind, values))
    return Feature(INTEGERS, b"")


def _packed_values(kind: int, data: bytes) -> bytes:
    """The values of a list; a list that is not packed has a tag before each value, which is removed."""
    if kind == BYTES or not data:
        return data
    if data[0] == _PACKED:
        return b"".join(values for _, values in _fields(data))
    if kind == FLOATS:
        if len(data) % 5:
            raise BrokenMessage("a list of floats is cut short")
        return np.frombuffer(data, np.uint8).reshape(-1, 5)[:, 1:].tobytes()
    numbers = decode_varints(data)
    if len(numbers) % 2 or (numbers[::2] != 1 << 3).any():
        raise BrokenMessage("a list of integers is not readable")
    return encode_varints(numbers[1::2])


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, bytes) of the length-delimited fields of a message; others are skipped."""
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        wire_type = tag & 7
        if wire_type == _LENGTH_DELIMITED:
            length, position = _read_varint(data, position)
            if position + length > len(data):
                raise BrokenMessage("a field is cut short")
            yield tag >> 3, data[position : position + length]
            position += length
        elif wire_type == _VARINT:
            _, position = _read_varint(data, position)
        elif wire_type in (_FIXED32, _FIXED64):
            position += 4 if wire_type == _FIXED32 else 8
        else:
            raise BrokenMessage(f"a field has the unknown type {wire_type}")


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """(the integer that starts at a position, the position after it): seven bits a byte, the lowest first."""
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        value |= (byte & 127) << shift
        position = position + 1
        shift = shift + 7
        if byte < 128:
            return value, position
    raise BrokenMessage("a number is cut short")


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


def count_varints(data: bytes) -> int:
    """How many integers a packed list has."""
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) < 128))


def encode_varints(numbers: NDArray[np.int64]) -> bytes:
    """A packed list of integers."""
    return split_varints(numbers[None])[0]


def split_varints(rows: NDArray[np.int64]) -> list[bytes]:
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
    """One Example for each row of the columns, which are [rows, values] of int64 or float32."""
    encoded: list[Sequence[bytes]] = []
    for name, values in columns.items():
        kind = INTEGERS if np.issubdtype(values.dtype, np.integer) else FLOATS
        lists = split_varints(values) if kind == INTEGERS else [row.astype("<f4").tobytes() for row in values]
        key = _delimited(1, name.encode())
        encoded.append([_delimited(1, key + _delimited(2, _delimited(kind, _delimited(1, data)))) for data in lists])
    return [_delimited(1, b"".join(parts)) for parts in zip(*encoded, strict=True)]


def _delimited(number: int, data: bytes) -> bytes:
    """A length-delimited field."""
    length = len(data)
    head = bytearray([number << 3 | _LENGTH_DELIMITED])
    while length > 127:
        head.append(length & 127 | 128)
        length >>= 7
    head.append(length)
    return bytes(head) + data
