"""Plain text: a document is a section, a blank-line block, a line or the file."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator

from textmill.config import CorpusConfig
from textmill.corpus import records
from textmill.corpus.document import Document
from textmill.corpus.records import RAW, Bad, Unreadable, decoded, lines_of, not_utf8, refuse_long
from textmill.corpus.source import Piece, Range, Source
from textmill.corpus.sources import line_ranges
from textmill.corpus.streams import open_stream

LONGEST_BLOCK = 8 << 20
"""Characters of a blank-line block after which it is cut all the same."""

# A carriage return and its line feed are one newline: the atomic group never gives half of it back.
_NEWLINE = r"(?>\r\n|[\r\n])"
_LINE_END = re.compile(_NEWLINE)
_BLANK_LINE = re.compile(rf"{_NEWLINE}[ \t]*+{_NEWLINE}")
_LEADING = re.compile(rf"(?:[ \t]*+{_NEWLINE})*+")


def ranges(source: Source, documents: str) -> Iterator[Range] | None:
    """Whole lines, where a line is a document."""
    return line_ranges(source) if documents == "line" else None


def read(piece: Piece, config: CorpusConfig) -> Iterator[Document | Bad]:
    """The documents that `corpus.documents` asks for."""
    if config.documents == "line":
        yield from _line_records(piece)
    elif config.documents == "file":
        yield _file_record(piece)
    else:
        yield from _stretch_records(piece, config)


def _line_records(piece: Piece) -> Iterator[Document | Bad]:
    name = piece.source.name
    for number, line, length in lines_of(piece):
        place = f"line {number}"
        try:
            refuse_long(length)
            text = decoded(line)
            yield Document(text[: -1 - text.endswith("\r\n")] if text.endswith("\n") else text, name, place)
        except Unreadable as error:
            yield Bad(name, place, str(error)[:RAW], line[:RAW])


def _file_record(piece: Piece) -> Document | Bad:
    name, blocks, size = piece.source.name, [], 0
    with open_stream(piece.source.address) as stream:
        while size <= records.MAX_RECORD and (block := stream.read1(records.BLOCK)):
            blocks.append(block)
            size += len(block)
    raw = b"".join(blocks)
    try:
        if size > records.MAX_RECORD:
            raise Unreadable(f"the file has more than {records.MAX_RECORD:,} bytes; set corpus.documents=section")
        return Document(decoded(raw), name, "file")
    except Unreadable as error:
        return Bad(name, "file", str(error), raw[:RAW])


def _stretch_records(piece: Piece, config: CorpusConfig) -> Iterator[Document | Bad]:
    size = config.section
    limits = (size, 2 * size, 4 * size) if config.documents == "section" else (1, LONGEST_BLOCK, 2 * LONGEST_BLOCK)
    with open_stream(piece.source.address) as stream:
        for number, text in enumerate(stretches(stream, *limits), 1):
            yield _stretch_record(text, piece.source.name, f"{config.documents} {number}")


def _stretch_record(text: str, name: str, place: str) -> Document | Bad:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raw = text.encode(errors="surrogateescape")
        return Bad(
            name, place, not_utf8(raw, ord(text[error.start]) & 0xFF, len(text[: error.start].encode())), raw[:RAW]
        )
    if text.startswith("\0") and not text.strip("\0\r\n"):
        return Bad(name, place, "nothing but NUL bytes", text[:RAW].encode())
    return Document(text, name, place)


def stretches(stream: io.BufferedReader, size: int, soft: int, hard: int) -> Iterator[str]:
    """Text cut where `_cut` says; bytes that are no UTF-8 come as lone surrogates, so that cutting goes on around them."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text, start, last, held = "", 0, False, b""
    if stream.peek(3)[:3] == codecs.BOM_UTF8:
        stream.read(3)
    while True:
        start = _LEADING.match(text, start).end()  # type: ignore[union-attr]
        end = _cut(text, start, size, soft, hard, last)
        if end is not None:
            if end > start and not text[start:end].isspace():
                yield text[start:end]
            start = end
        elif not last:
            text, start = text[start:], 0
            fresh = stream.read1(max(records.BLOCK, len(text)))
            last = not fresh
            fresh = held + fresh
            # Never stop between CR and LF: what is found must not depend on where blocks end.
            held = b"\r" if fresh.endswith(b"\r") and not last else b""
            text += decoder.decode(fresh[: len(fresh) - len(held)], final=last)
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
