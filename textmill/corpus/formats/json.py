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
from textmill.corpus.records import RAW_BYTES, BadRecord, UnreadableRecord, read_lines
from textmill.corpus.source import SourceChunk
from textmill.corpus.streams import BUFFER_BYTES, open_stream
from textmill.corpus.text_fields import TextFields, parse_text_key

_DECODER = json.JSONDecoder()
RETRY_CHARACTERS = 16
"""Characters at a buffer's end where a mistake may only be a word that goes on."""


def read(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """A record an element of the array, or a value; what is broken ends the file, since nothing tells where the next record begins."""
    fields = parse_text_key(chunk.source, config)
    with open_stream(chunk.source.address) as stream:
        if _is_lines(stream.peek(BUFFER_BYTES)):
            for number, line, length in read_lines(chunk):
                yield from jsonl.line_records(line, length, f"line {number}", fields)
            return
        scanner = _Scanner(stream)
        try:
            while scanner.peek():
                yield from _value_records(scanner, fields)
        except UnreadableRecord as error:
            yield BadRecord(
                chunk.source.name, scanner.place, f"{error}; the file is not read further"[:RAW_BYTES], scanner.raw()
            )


def _is_lines(head: bytes) -> bool:
    """Whether the first line is an object of its own with something after it."""
    first, _, rest = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    if not rest.strip() or not first.startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _value_records(scanner: _Scanner, fields: TextFields) -> Iterator[Document | BadRecord]:
    list_path = fields.list_paths[0] if fields.list_paths else None
    char = scanner.peek()
    scanner.count += 1
    if char == "[":
        for index, element in enumerate(scanner.elements()):
            scanner.place = f"item {index}" if scanner.count == 1 else f"value {scanner.count}, item {index}"
            if list_path == ():
                yield from fields.element_documents(element, scanner.place, scanner.raw())
            else:
                yield from fields.documents(element, scanner.place, scanner.raw())
    elif char == "{" and list_path is not None and len(list_path) == 1:
        yield from _member_records(scanner, fields, list_path[0])
    else:
        scanner.place = f"value {scanner.count}"
        yield from fields.documents(scanner.value(), scanner.place, scanner.raw())


def _member_records(scanner: _Scanner, fields: TextFields, name: str) -> Iterator[Document | BadRecord]:
    """The elements of the list `name` of one object, one at a time, however long it is; of its other members only the names are kept."""
    object_place = f"value {scanner.count}"
    scanner.place, raw, names, found = object_place, scanner.raw(), [], 0
    for key in scanner.members():
        names.append(key)
        if key != name or scanner.peek() != "[":
            scanner.value()
            continue
        for element in scanner.elements():
            scanner.place = f"{object_place}, {name}[{found}]"
            found += 1
            yield from fields.element_documents(element, scanner.place, scanner.raw())
        if not found:
            yield Document("", fields.source, object_place)
            found = 1
    if not found:
        yield BadRecord(fields.source, object_place, f"no list '{name}[]'; found {sorted(names)[:12]}", raw)


class _Scanner:
    """JSON values off a stream, with no more of it in memory than the value at hand."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self.stream = stream
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self.text, self.at, self.start, self.at_end = "", 0, 0, False
        self.count, self.place = 0, "beginning"

    def raw(self) -> bytes:
        """The beginning of the value at hand."""
        return self.text[self.start : self.start + RAW_BYTES].encode(errors="backslashreplace")[:RAW_BYTES]

    def read_more(self) -> bool:
        """Read on; as much again as is held, so that a long value is not begun anew too often."""
        if self.at_end:
            return False
        self.text, self.at, self.start = self.text[self.start :], self.at - self.start, 0
        if len(self.text) > records.MAX_RECORD_BYTES:
            raise UnreadableRecord(f"a value has more than {records.MAX_RECORD_BYTES:,} characters")
        block = self.stream.read1(max(BUFFER_BYTES, len(self.text)))
        self.at_end = not block
        self.text += self.decoder.decode(block, final=self.at_end)
        return not self.at_end

    def peek(self) -> str:
        """The next character that is no space; nothing at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
                self.at += 1
            self.start = self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.read_more():
                return ""

    def value(self) -> object:
        """The value that begins here."""
        if not self.peek():
            raise UnreadableRecord("the file ends in the middle")
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.start)
            except RecursionError:
                raise UnreadableRecord("JSON nested too deep") from None
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self.text) - RETRY_CHARACTERS or error.msg.startswith("Unterminated string")
                if not cut or not self.read_more():
                    raise UnreadableRecord(
                        f"not JSON: {error.msg} at character {error.pos - self.start:,} of the value"
                    ) from None
            except ValueError as error:  # a number of more digits than Python reads
                raise UnreadableRecord(f"not JSON: {error}") from None
            else:
                if not self._may_continue(value, end) or not self.read_more():
                    self.at = end
                    return value

    def _may_continue(self, value: object, end: int) -> bool:
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
            if self._expect(",]") == "]":
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
                raise UnreadableRecord("not JSON: a key is no text")
            self._expect(":")
            yield key
            if self._expect(",}") == "}":
                return

    def _expect(self, expected: str) -> str:
        found = self.peek()
        if not found or found not in expected:
            raise UnreadableRecord(
                f"not JSON: found {found!r} in place of one of {expected!r}" if found else "the file ends in the middle"
            )
        self.at += 1
        return found
