"""Reading a piece of a source: every record becomes a Document or a Bad row, with flat memory."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass

from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.source import SourceChunk
from textmill.corpus.sources import format_module
from textmill.corpus.streams import BrokenStream, open_stream

MAX_RECORD_BYTES = 256 << 20
"""Bytes; a longer record is no document but a broken file."""
RAW_BYTES = 1000
"""Bytes of a bad record that are kept."""
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class BadRecord:
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


class UnreadableRecord(Exception):
    """The reason why a record is bad."""


def read_records(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """The records of a piece in order; blank ones are documents without text; a stream that breaks off ends in a Bad row."""
    place = ""
    try:
        for record in format_module(chunk.source).read(chunk, config):
            place = record.place if isinstance(record, BadRecord) else record.id
            yield record
    except BrokenStream as error:
        yield BadRecord(chunk.source.name, f"after {place}" if place else "beginning", str(error)[:RAW_BYTES], b"")


def read_lines(chunk: SourceChunk) -> Iterator[tuple[int, bytes, int]]:
    """(number, line, length); of a line beyond MAX_RECORD only the beginning is held."""
    with open_stream(chunk.source.address) as stream:
        if not chunk.is_entire_source:
            stream.seek(chunk.start)
        left, number = chunk.stop - chunk.start, chunk.first_record
        while (chunk.is_entire_source or left > 0) and (line := stream.readline(MAX_RECORD_BYTES + 1)):
            length, rest = len(line), line
            while length > MAX_RECORD_BYTES and not rest.endswith(b"\n") and (rest := stream.readline(READ_BYTES)):
                length += len(rest)
            yield number, line, length
            left -= length
            number += 1


def check_line_length(length: int) -> None:
    """A line that has lost its end is no record."""
    if length > MAX_RECORD_BYTES:
        raise UnreadableRecord(
            f"the line has {length:,} bytes, and {MAX_RECORD_BYTES:,} are the most; it has lost its line ends"
        )


def decode_utf8(raw: bytes) -> str:
    """Strict UTF-8, a byte order mark taken off."""
    if raw.startswith(b"\0") and not raw.strip(b"\0\r\n"):
        raise UnreadableRecord("nothing but NUL bytes")
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise UnreadableRecord(describe_encoding_error(raw, error.object[error.start], error.start)) from None


def describe_encoding_error(raw: bytes, byte: int, place: int) -> str:
    """What to say of bytes in another encoding."""
    problem = f"not UTF-8: byte 0x{byte:02x} at {place:,}; "
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return problem + "it looks like UTF-16: convert the file to UTF-8"
    return problem + "if the file has another encoding, convert it to UTF-8 (iconv does)"
