"""Read the records of a source chunk as documents or bad records, in constant memory.

A record that cannot be read does not end the command: it goes to quarantine.jsonl, with its place and the reason. Only
too many of them do (`check_quarantine`).
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from textmill.config import CorpusConfig
from textmill.corpus.document import READ_BYTES, Document, cut_into_sections
from textmill.corpus.encodings import advise_encodings, suggest_encoding
from textmill.corpus.source import SourceChunk
from textmill.corpus.sources import format_module
from textmill.corpus.streams import BrokenStream, open_stream
from textmill.errors import TextmillError
from textmill.storage.files import format_path, write_bytes

MAX_RECORD_BYTES = 256 << 20
"""A longer record is treated as damaged."""
QUARANTINE = "quarantine.jsonl"
"""The file of the bad records in a corpus folder."""
RAW_BYTES = 1000
"""Bytes of a bad record that are kept in the quarantine."""
NOT_UTF8 = "not UTF-8"
ENCODING_HINT = "; it looks like"
"""In the reason of a record that is not UTF-8, and before a guess at its encoding."""


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that could not be read, with the reason."""

    source: str
    place: str
    reason: str
    raw: bytes
    """The first bytes of the record."""
    bytes_lost: int = 0
    """Bytes of the record; 0 if they are unknown or no more than `raw`."""

    def __str__(self) -> str:
        kind, _, number = self.place.partition(" ")
        where = f"{self.source}:{number}" if kind == "line" else f"{self.source}, {self.place}"
        return f"{where}: {self.reason}"


class UnreadableRecord(Exception):
    """Raised with the reason why a record cannot be read."""


def read_records(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """The records of a chunk, in order.

    A blank record is a document without text. If the stream is damaged, the last item is a bad record. With
    `corpus.cut_records` the text of each record is cut into sections, as plain text is when it is read.
    """
    place = ""
    try:
        for record in format_module(chunk.source).read(chunk, config):
            place = record.place if isinstance(record, BadRecord) else record.id
            if config.cut_records and isinstance(record, Document):
                yield from _cut_record(record, config.section_chars)
            else:
                yield record
    except BrokenStream as error:
        yield BadRecord(chunk.source.name, f"after {place}" if place else "beginning", str(error)[:RAW_BYTES], b"")


def _cut_record(record: Document, size: int) -> Iterator[Document]:
    """The sections of a record; a short record is its only section."""
    sections = cut_into_sections(record.text, size)
    if len(sections) < 2:
        yield record
    else:
        for number, text in enumerate(sections, 1):
            yield replace(record, text=text, id=f"{record.id}, section {number}")


def read_lines(chunk: SourceChunk) -> Iterator[tuple[int, bytes, int]]:
    """Yield (line number, line, length in bytes); only the start of a line over MAX_RECORD_BYTES is returned."""
    with open_stream(chunk.source) as stream:
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
        raise UnreadableRecord(describe_encoding_error(raw, error.object[error.start], error.start)) from None


def describe_encoding_error(raw: bytes, byte: int, place: int) -> str:
    """The error message for bytes that are not UTF-8."""
    problem = f"{NOT_UTF8}: byte 0x{byte:02x} at {place:,}"
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return problem + f"{ENCODING_HINT} UTF-16: set corpus.encoding=utf-16"
    if found := suggest_encoding(raw):
        return problem + f"{ENCODING_HINT} {found}: set corpus.encoding={found}"
    return problem + "; if the file has another encoding, name it with corpus.encoding"


def write_quarantine(path: Path, bad_records: Iterable[BadRecord]) -> dict[str, Any]:
    """Write the bad records of all chunks, a line each; return the manifest entry of the file."""
    return write_bytes(path, (_quarantine_line(bad) for bad in bad_records))


def _quarantine_line(bad: BadRecord) -> bytes:
    raw = bad.raw.decode(errors="backslashreplace")
    return json_line({"file": bad.source, "place": bad.place, "reason": bad.reason, "raw": raw})


def json_line(row: dict[str, Any]) -> bytes:
    """A line of a JSON lines file."""
    return json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def check_quarantine(
    path: Path,
    bad_records: Iterable[BadRecord],
    counts_by_chunk: Iterable[Mapping[str, Any]],
    max_unreadable: float,
    find_encodings: Callable[[], Mapping[str, str]],
) -> None:
    """Refuse to go on if too large a part of the records, or of the bytes, is unreadable; `path`: where they are.

    `find_encodings` guesses the encodings of all files, which is surer than a guess for one record.
    """
    total: Counter[str] = Counter()
    for counts in counts_by_chunk:
        total.update({key: counts.get(key, 0) for key in ("records", "quarantined", "bytes", "quarantined_bytes")})
    if total["quarantined"] > max_unreadable * total["records"]:
        amount = f"{total['quarantined']:,} of {total['records']:,} records"
    elif total["quarantined_bytes"] > max_unreadable * total["bytes"]:
        amount = f"{total['quarantined_bytes']:,} of {total['bytes']:,} bytes"
    else:
        return
    first = str(next(iter(bad_records), ""))
    if NOT_UTF8 in first and (encodings := find_encodings()):
        first = f"{first.partition(ENCODING_HINT)[0]}; {advise_encodings(encodings)}"
    some = "corpus.text_key=" in first and total["quarantined"] < total["records"]
    advice = (
        " (corpus.text_key=text+body reads files with the field text and files with the field body)" if some else ""
    )
    raise TextmillError(
        f"corpus.sources: {amount} are unreadable, more than corpus.max_unreadable={max_unreadable:g}; "
        f"the first: {first}; all of them are in {format_path(path)}; fix the files or the setting{advice}, "
        f"or raise corpus.max_unreadable to continue without them"
    )
