"""Reading a piece of a source: every record becomes a Document or a Bad row, with flat memory."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.sources import Piece

MAX_RECORD = 256 << 20
"""Bytes; a longer record is no document but a broken file."""
RAW = 1000
"""Bytes of a bad record that are kept."""
BLOCK = 1 << 16
LONGEST_BLOCK = 8 << 20
"""Characters of a blank-line block after which it is cut all the same."""

# A carriage return and its line feed are one newline: the atomic group never gives half of it back.
_NEWLINE = r"(?>\r\n|[\r\n])"
_LINE_END = re.compile(_NEWLINE)
_BLANK_LINE = re.compile(rf"{_NEWLINE}[ \t]*+{_NEWLINE}")
_LEADING = re.compile(rf"(?:[ \t]*+{_NEWLINE})*+")


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


class _Unreadable(Exception):
    """The reason why a record is bad."""


def read_records(piece: Piece, config: CorpusConfig) -> Iterator[Document | Bad]:
    """The records of a piece in order; blank ones are documents without text."""
    if piece.source.format == "jsonl":
        yield from _line_records(piece, partial(_json_text, key=config.text_key))
    elif config.documents == "line":
        yield from _line_records(piece, _plain_text)
    elif config.documents == "file":
        yield _file_record(piece)
    else:
        yield from _stretch_records(piece, config)


def _line_records(piece: Piece, text_of: Callable[[bytes], str]) -> Iterator[Document | Bad]:
    name = piece.source.name
    for number, line, length in _lines(piece):
        place = f"line {number}"
        try:
            if length > MAX_RECORD:
                raise _Unreadable(f"the line has {length:,} bytes, and {MAX_RECORD:,} are the most; it has lost its line ends")
            yield Document(text_of(line), name, place)
        except _Unreadable as error:
            yield Bad(name, place, str(error)[:RAW], line[:RAW])


def _lines(piece: Piece) -> Iterator[tuple[int, bytes, int]]:
    """(number, line, length); of a line beyond MAX_RECORD only the beginning is held."""
    with open(piece.source.path, "rb", buffering=1 << 20) as stream:
        stream.seek(piece.start)
        left, number = piece.stop - piece.start, piece.first
        while left > 0 and (line := stream.readline(MAX_RECORD + 1)):
            length, end = len(line), line
            while length > MAX_RECORD and not end.endswith(b"\n") and (end := stream.readline(BLOCK)):
                length += len(end)
            yield number, line, length
            left -= length
            number += 1


def _plain_text(line: bytes) -> str:
    """A line without its end."""
    text = _decoded(line)
    return text[: -1 - text.endswith("\r\n")] if text.endswith("\n") else text


def _json_text(line: bytes, key: str) -> str:
    """The field `key` of a JSON object; a blank line has none and is empty text."""
    text = _decoded(line)
    if text.isspace() or not text:
        return ""
    try:
        value = json.loads(text)
    except RecursionError:
        raise _Unreadable("JSON nested too deep") from None
    except json.JSONDecodeError as error:
        raise _Unreadable(f"not JSON: {error.msg} at column {min(error.pos, len(text.rstrip())) + 1}") from None
    except ValueError as error:  # a number of more digits than Python reads
        raise _Unreadable(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _Unreadable(f"found a JSON {_json_kind(value)}; a line is an object with the field '{key}'")
    found = value.get(key)
    if not isinstance(found, str):
        raise _Unreadable(_missing(value, key))
    if b"\\u" in line:  # only an escape can make what strict UTF-8 cannot hold
        _refuse_surrogates(found)
    return found


def _missing(value: dict[str, object], key: str) -> str:
    if key in value:
        return f"field '{key}' is {_json_kind(value[key])}, not text"
    texts = [name for name, inner in value.items() if isinstance(inner, str) and name.isprintable()]
    advice = f"; set corpus.text_key={max(texts, key=lambda name: len(str(value[name])))}" if texts else ""
    return f"no field '{key}'; found {sorted(value)[:12]}{advice}"


def _json_kind(value: object) -> str:
    kinds = {dict: "object", list: "list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "number")


def _decoded(raw: bytes) -> str:
    """Strict UTF-8, a byte order mark taken off."""
    if raw.startswith(b"\0") and not raw.strip(b"\0\r\n"):
        raise _Unreadable("nothing but NUL bytes")
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        raise _Unreadable(_not_utf8(raw, error.object[error.start], error.start)) from None


def _not_utf8(raw: bytes, byte: int, place: int) -> str:
    utf16 = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return f"not UTF-8: byte 0x{byte:02x} at {place:,}" + ("; it looks like UTF-16: convert the file to UTF-8" if utf16 else "")


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Unreadable(f"half a surrogate pair, \\u{ord(text[error.start]):04x}, at character {error.start:,}") from None


def _file_record(piece: Piece) -> Document | Bad:
    name, raw = piece.source.name, b""
    try:
        if piece.stop > MAX_RECORD:
            raise _Unreadable(f"the file has {piece.stop:,} bytes, and {MAX_RECORD:,} are the most; set corpus.documents=section")
        raw = piece.source.path.read_bytes()
        return Document(_decoded(raw), name, "file")
    except _Unreadable as error:
        return Bad(name, "file", str(error), raw[:RAW])


def _stretch_records(piece: Piece, config: CorpusConfig) -> Iterator[Document | Bad]:
    size = config.section
    limits = (size, 2 * size, 4 * size) if config.documents == "section" else (1, LONGEST_BLOCK, 2 * LONGEST_BLOCK)
    with open(piece.source.path, "rb") as stream:
        for number, text in enumerate(_stretches(stream, *limits), 1):
            yield _stretch_record(text, piece.source.name, f"{config.documents} {number}")


def _stretch_record(text: str, name: str, place: str) -> Document | Bad:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raw = text.encode(errors="surrogateescape")
        return Bad(name, place, _not_utf8(raw, ord(text[error.start]) & 0xFF, len(text[: error.start].encode())), raw[:RAW])
    if text.startswith("\0") and not text.strip("\0\r\n"):
        return Bad(name, place, "nothing but NUL bytes", text[:RAW].encode())
    return Document(text, name, place)


def _stretches(stream: BinaryIO, size: int, soft: int, hard: int) -> Iterator[str]:
    """Text cut where `_cut` says; bytes that are no UTF-8 come as lone surrogates, so that cutting goes on around them."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text, start, last = "", 0, False
    if stream.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
        stream.seek(0)
    while True:
        start = _LEADING.match(text, start).end()  # type: ignore[union-attr]
        end = _cut(text, start, size, soft, hard, last)
        if end is not None:
            if end > start and not text[start:end].isspace():
                yield text[start:end]
            start = end
        elif not last:
            text, start = text[start:], 0
            fresh = stream.read(max(BLOCK, len(text)))
            while fresh.endswith(b"\r") and (more := stream.read(1)):
                fresh += more  # never stop between CR and LF: what is found must not depend on where blocks end
            last = not fresh
            text += decoder.decode(fresh, final=last)
        else:
            return


def _cut(text: str, start: int, size: int, soft: int, hard: int, last: bool) -> int | None:
    """Where the document at `start` ends, judged by nothing that comes after; None: not before more text is there."""
    if found := _BLANK_LINE.search(text, start + size - 1, start + soft):
        return found.end()
    if len(text) - start >= soft:
        if found := _LINE_END.search(text, start + soft - 1, start + hard):
            return found.end()
        if len(text) - start >= hard:
            return start + hard
    return len(text) if last and len(text) > start else None
