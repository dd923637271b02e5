"""Read the records of a source chunk as documents or bad records, in constant memory.

A record that cannot be read does not end the command: it goes to quarantine.jsonl, with its place and the reason. Only
too many of them do (`corpus.max_unreadable`).
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from textmill.corpus.document import READ_BYTES
from textmill.corpus.encodings import suggest_encoding
from textmill.corpus.source import ChunkRange, Damage, Source, SourceChunk
from textmill.corpus.streams import is_splittable, open_stream

CHUNK_BYTES = 64 << 20
MIN_CHUNK_BYTES = 4 << 20
CHUNKS = 256
"""Least number of chunks: a small corpus has smaller chunks, so that there is work for many processes."""
MAX_RECORD_BYTES = 256 << 20
"""A longer record is treated as damaged."""
RAW_BYTES = 1000
"""Bytes of a bad record, and characters of the reason, that are kept in the quarantine."""
NOT_UTF8 = "not UTF-8"
ENCODING_HINT = "; it looks like"
"""In the reason of a record that is not UTF-8, and before a guess at its encoding."""
NO_TEXT_LAYER = "no text layer"
"""Begins the reason of a scanned document."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that could not be read, with the reason."""

    source: str
    place: str
    reason: str
    raw: bytes
    """The record, of which the first bytes are kept."""
    bytes_lost: int = 0
    """Bytes of the record; 0 if they are unknown or no more than `raw`."""
    damage: Damage | None = None
    """Set if earlier records of its source may be wrong too, since the file is damaged."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", self.reason[:RAW_BYTES])
        object.__setattr__(self, "raw", self.raw[:RAW_BYTES])

    def __str__(self) -> str:
        return f"{format_place(self.source, self.place)}: {self.reason}"

    @property
    def is_scan(self) -> bool:
        """True for a scanned document."""
        return self.reason.startswith(NO_TEXT_LAYER)


def format_place(source: str, place: str) -> str:
    """FILE:LINE if the place is a line."""
    kind, _, number = place.partition(" ")
    return f"{source}:{number}" if kind == "line" else f"{source}, {place}"


class UnreadableRecord(Exception):
    """Raised with the reason why a record cannot be read."""


def read_lines(chunk: SourceChunk) -> Iterator[tuple[int, bytes, int]]:
    """Yield (line number, line, length in bytes); only the start of a line over MAX_RECORD_BYTES is returned."""
    with open_stream(chunk.source, by_line=chunk.is_entire_source) as stream:
        if not chunk.is_entire_source:
            stream.seek(chunk.start)
        bytes_left = chunk.stop - chunk.start
        number = chunk.first_record
        while (chunk.is_entire_source or bytes_left > 0) and (line := stream.readline(MAX_RECORD_BYTES + 1)):
            length = len(line)
            rest = line
            while length > MAX_RECORD_BYTES and not rest.endswith(b"\n") and (rest := stream.readline(READ_BYTES)):
                length += len(rest)
            yield number, line, length
            bytes_left -= length
            number += 1


def chunk_bytes_of(total: int) -> int:
    """The size of a chunk of a corpus of `total` bytes.

    It decides where output shards end, so it does not depend on the number of workers.
    """
    return min(CHUNK_BYTES, max(MIN_CHUNK_BYTES, total // CHUNKS))


def line_ranges(source: Source, chunk_bytes: int) -> Iterator[ChunkRange] | None:
    """Ranges of complete lines, about `chunk_bytes` each; None if the file cannot be split."""
    return _line_ranges(source.path, chunk_bytes) if is_splittable(source) else None


def _line_ranges(path: Path, chunk_bytes: int) -> Iterator[ChunkRange]:
    """Yield (start, stop, number of the first line), cut at the first line end after `chunk_bytes` bytes."""
    size = os.path.getsize(path)
    with open(path, "rb") as stream:
        start = 0
        first = 1
        while start < size:
            lines = 0
            while stream.tell() < min(start + chunk_bytes, size) and (
                block := stream.read(min(READ_BYTES, start + chunk_bytes - stream.tell()))
            ):
                lines += block.count(b"\n")
            while (rest := stream.readline(READ_BYTES)) and not rest.endswith(b"\n"):
                pass
            stop = min(stream.tell(), size)
            if stop <= start:
                return
            yield start, stop, first
            start = stop
            first = first + lines + rest.endswith(b"\n")


def check_line_length(length: int) -> None:
    """Refuse a line that is too long to be a record."""
    if length > MAX_RECORD_BYTES:
        raise UnreadableRecord(
            f"the line has {length:,} bytes, more than the maximum of {MAX_RECORD_BYTES:,}; line ends are missing"
        )


def decode_utf8(raw: bytes) -> str:
    """Decode strict UTF-8 and remove a byte order mark."""
    if raw.startswith(b"\0") and not raw.strip(b"\0\r\n"):
        raise UnreadableRecord("nothing but NUL bytes")
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise UnreadableRecord(describe_encoding_error(error.object, error.start)) from None


def check_utf8(text: str) -> None:
    """Refuse a text in which bytes that are not UTF-8 have become lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raw = text.encode(errors="surrogateescape")
        raise UnreadableRecord(describe_encoding_error(raw, len(text[: error.start].encode()))) from None


def describe_encoding_error(raw: bytes, place: int) -> str:
    """The error message for bytes of which the one at `place` is not UTF-8."""
    problem = f"{NOT_UTF8}: byte 0x{raw[place]:02x} at {place:,}"
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return problem + f"{ENCODING_HINT} UTF-16: set corpus.encoding=utf-16"
    if found := suggest_encoding(raw):
        return problem + f"{ENCODING_HINT} {found}: set corpus.encoding={found}"
    return problem + "; if the file has another encoding, name it with corpus.encoding"
