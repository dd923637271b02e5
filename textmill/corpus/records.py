"""Reading a piece of a source: every record becomes a Document or a Bad row, with flat memory."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass

from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.source import Piece
from textmill.corpus.sources import format_of
from textmill.corpus.streams import Broken, open_stream

MAX_RECORD = 256 << 20
"""Bytes; a longer record is no document but a broken file."""
RAW = 1000
"""Bytes of a bad record that are kept."""
BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Bad:
    """A record that cannot be read, and why."""

    source: str
    place: str
    reason: str
    raw: bytes
    """Its first bytes."""

    def __str__(self) -> str:
        kind, _, number = self.place.partition(" ")
        where = f"{self.source}:{number}" if kind == "line" else f"{self.source}, {self.place}"
        return f"{where}: {self.reason}"


class Unreadable(Exception):
    """The reason why a record is bad."""


def read_records(piece: Piece, config: CorpusConfig) -> Iterator[Document | Bad]:
    """The records of a piece in order; blank ones are documents without text; a stream that breaks off ends in a Bad row."""
    place = ""
    try:
        for record in format_of(piece.source).read(piece, config):
            place = record.place if isinstance(record, Bad) else record.id
            yield record
    except Broken as error:
        yield Bad(piece.source.name, f"after {place}" if place else "beginning", str(error)[:RAW], b"")


def lines_of(piece: Piece) -> Iterator[tuple[int, bytes, int]]:
    """(number, line, length); of a line beyond MAX_RECORD only the beginning is held."""
    with open_stream(piece.source.address) as stream:
        if not piece.whole:
            stream.seek(piece.start)
        left, number = piece.stop - piece.start, piece.first
        while (piece.whole or left > 0) and (line := stream.readline(MAX_RECORD + 1)):
            length, end = len(line), line
            while length > MAX_RECORD and not end.endswith(b"\n") and (end := stream.readline(BLOCK)):
                length += len(end)
            yield number, line, length
            left -= length
            number += 1


def refuse_long(length: int) -> None:
    """A line that has lost its end is no record."""
    if length > MAX_RECORD:
        raise Unreadable(f"the line has {length:,} bytes, and {MAX_RECORD:,} are the most; it has lost its line ends")


def decoded(raw: bytes) -> str:
    """Strict UTF-8, a byte order mark taken off."""
    if raw.startswith(b"\0") and not raw.strip(b"\0\r\n"):
        raise Unreadable("nothing but NUL bytes")
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise Unreadable(not_utf8(raw, error.object[error.start], error.start)) from None


def not_utf8(raw: bytes, byte: int, place: int) -> str:
    """What to say of bytes in another encoding."""
    found = f"not UTF-8: byte 0x{byte:02x} at {place:,}; "
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return found + "it looks like UTF-16: convert the file to UTF-8"
    return found + "if the file has another encoding, convert it to UTF-8 (iconv does)"
