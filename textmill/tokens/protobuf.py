"""The wire format of protocol buffers, for sentencepiece's models and TensorFlow's examples.

The protobuf library would be a dependency more, and needs generated classes for both messages; a codec without them is
shorter.
"""

from __future__ import annotations

VARINT = 0
FIXED64 = 1
DELIMITED = 2
FIXED32 = 5
"""Types of fields: an integer, 8 bytes, bytes with their length (also texts and messages), 4 bytes."""


class BrokenMessage(ValueError):
    """Bytes that are not a message."""


def read_fields(data: bytes) -> tuple[dict[int, int], dict[int, list[bytes]]]:
    """The integers of a message by field number, and all its other fields as bytes, in their order."""
    integers: dict[int, int] = {}
    others: dict[int, list[bytes]] = {}
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        kind = tag & 7
        if kind == VARINT:
            integers[tag >> 3], position = _read_varint(data, position)
            continue
        if kind == DELIMITED:
            length, position = _read_varint(data, position)
        elif kind in (FIXED32, FIXED64):
            length = 4 if kind == FIXED32 else 8
        else:
            raise BrokenMessage(f"a field has the unknown type {kind}, before byte {position:,}")
        if position + length > len(data):
            raise BrokenMessage(f"it ends inside a field, at byte {position:,}")
        others.setdefault(tag >> 3, []).append(data[position : position + length])
        position += length
    return integers, others


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """(the integer that starts at a position, the position after it): seven bits a byte, the lowest first."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(data):
            raise BrokenMessage("it ends inside a number")
        byte = data[position]
        value |= (byte & 127) << shift
        position += 1
        if byte < 128:
            return value, position
    raise BrokenMessage(f"a number without end, before byte {position:,}")


def bytes_field(field: int, data: bytes) -> bytes:
    """A field with bytes, a text or a message."""
    return _varint(field << 3 | DELIMITED) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])
