"""JSON files, streamed: an array, one object, objects one after the other, or JSON lines under another name."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator

from textmill.config import CorpusConfig
from textmill.corpus import records
from textmill.corpus.document import Document
from textmill.corpus.formats import jsonl
from textmill.corpus.records import RAW, Bad, Unreadable, lines_of
from textmill.corpus.source import Piece
from textmill.corpus.streams import BLOCK, open_stream
from textmill.corpus.text_fields import Fields, fields_of

_DECODER = json.JSONDecoder()
NEAR = 16
"""Characters at a buffer's end where a mistake may only be a word that goes on."""


def read(piece: Piece, config: CorpusConfig) -> Iterator[Document | Bad]:
    """A record an element of the array, or a value; what is broken ends the file, since nothing tells where the next record begins."""
    fields = fields_of(piece.source, config)
    with open_stream(piece.source.address) as stream:
        if _is_lines(stream.peek(BLOCK)):
            for number, line, length in lines_of(piece):
                yield from jsonl.line_records(line, length, f"line {number}", fields)
            return
        scanner = _Scanner(stream)
        try:
            while scanner.peek():
                yield from _value_records(scanner, fields)
        except Unreadable as error:
            yield Bad(piece.source.name, scanner.place, f"{error}; the file is not read further"[:RAW], scanner.raw())


def _is_lines(head: bytes) -> bool:
    """Whether the first line is an object of its own with something after it."""
    first, _, rest = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    if not rest.strip() or not first.startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _value_records(scanner: _Scanner, fields: Fields) -> Iterator[Document | Bad]:
    way = fields.lists[0] if fields.lists else None
    char = scanner.peek()
    scanner.count += 1
    if char == "[":
        for index, element in enumerate(scanner.elements()):
            scanner.place = f"item {index}" if scanner.count == 1 else f"value {scanner.count}, item {index}"
            if way == ():
                yield from fields.within(element, scanner.place, scanner.raw())
            else:
                yield from fields.documents(element, scanner.place, scanner.raw())
    elif char == "{" and way is not None and len(way) == 1:
        yield from _member_records(scanner, fields, way[0])
    else:
        scanner.place = f"value {scanner.count}"
        yield from fields.documents(scanner.value(), scanner.place, scanner.raw())


def _member_records(scanner: _Scanner, fields: Fields, name: str) -> Iterator[Document | Bad]:
    """The elements of the list `name` of one object, one at a time, however long it is; of its other members only the names are kept."""
    before = f"value {scanner.count}"
    scanner.place, raw, names, found = before, scanner.raw(), [], 0
    for key in scanner.members():
        names.append(key)
        if key != name or scanner.peek() != "[":
            scanner.value()
            continue
        for element in scanner.elements():
            scanner.place = f"{before}, {name}[{found}]"
            found += 1
            yield from fields.within(element, scanner.place, scanner.raw())
        if not found:
            yield Document("", fields.source, before)
            found = 1
    if not found:
        yield Bad(fields.source, before, f"no list '{name}[]'; found {sorted(names)[:12]}", raw)


class _Scanner:
    """JSON values off a stream, with no more of it in memory than the value at hand."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self.stream = stream
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self.text, self.at, self.start, self.last = "", 0, 0, False
        self.count, self.place = 0, "beginning"

    def raw(self) -> bytes:
        """The beginning of the value at hand."""
        return self.text[self.start : self.start + RAW].encode(errors="backslashreplace")[:RAW]

    def more(self) -> bool:
        """Read on; as much again as is held, so that a long value is not begun anew too often."""
        if self.last:
            return False
        self.text, self.at, self.start = self.text[self.start :], self.at - self.start, 0
        if len(self.text) > records.MAX_RECORD:
            raise Unreadable(f"a value has more than {records.MAX_RECORD:,} characters")
        block = self.stream.read1(max(BLOCK, len(self.text)))
        self.last = not block
        self.text += self.decoder.decode(block, final=self.last)
        return not self.last

    def peek(self) -> str:
        """The next character that is no space; nothing at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
                self.at += 1
            self.start = self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def value(self) -> object:
        """The value that begins here."""
        if not self.peek():
            raise Unreadable("the file ends in the middle")
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.start)
            except RecursionError:
                raise Unreadable("JSON nested too deep") from None
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self.text) - NEAR or error.msg.startswith("Unterminated string")
                if not cut or not self.more():
                    raise Unreadable(
                        f"not JSON: {error.msg} at character {error.pos - self.start:,} of the value"
                    ) from None
            except ValueError as error:  # a number of more digits than Python reads
                raise Unreadable(f"not JSON: {error}") from None
            else:
                if not self._goes_on(value, end) or not self.more():
                    self.at = end
                    return value

    def _goes_on(self, value: object, end: int) -> bool:
        """Whether a number may be only the part of it that is in the buffer."""
        return isinstance(value, int | float) and not self.text[end : end + 400].lstrip("0123456789+-.eE")

    def elements(self) -> Iterator[object]:
        """The elements of the array that begins here."""
        self.at += 1
        if self.peek() == "]":
            self.at += 1
            return
        while True:
            yield self.value()
            if self._sign(",]") == "]":
                return

    def members(self) -> Iterator[str]:
        """The keys of the object that begins here; the caller takes each value."""
        self.at += 1
        if self.peek() == "}":
            self.at += 1
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise Unreadable("not JSON: a key is no text")
            self._sign(":")
            yield key
            if self._sign(",}") == "}":
                return

    def _sign(self, wanted: str) -> str:
        found = self.peek()
        if not found or found not in wanted:
            raise Unreadable(
                f"not JSON: found {found!r} in place of one of {wanted!r}" if found else "the file ends in the middle"
            )
        self.at += 1
        return found
