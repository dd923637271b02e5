"""Read JSON files as a stream: an array, one or several objects, or JSON lines in a .json file."""

from __future__ import annotations

import codecs
import io
import json
import re
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
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"?|[][{},]', re.DOTALL)
RETRY_CHARACTERS = 16
"""A syntax error this close to the buffer's end may be a value that continues, so parsing is retried."""


def read(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """Yield one record per array element or value; after a syntax error the rest of the file cannot be read."""
    fields = parse_text_key(chunk.source, config)
    with open_stream(chunk.source) as stream:
        if _is_lines(stream.peek(BUFFER_BYTES)):
            for number, line, length in read_lines(chunk):
                yield from jsonl.line_records(line, length, f"line {number}", fields)
            return
        scanner = _Scanner(stream)
        try:
            while scanner.peek():
                yield from _value_records(scanner, fields)
        except UnreadableRecord as error:
            reason = str(error)[: RAW_BYTES // 2]
            raw = scanner.raw()
            lost = scanner.count_rest()
            reason = f"{reason}; the rest of the file is not read: {lost:,} bytes"
            yield BadRecord(chunk.source.name, scanner.place, reason, raw, lost)


def _is_lines(head: bytes) -> bool:
    """True if the first line is a complete object and more lines follow."""
    first, _, rest = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    if not rest.strip() or not first.startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def sample_values(head: str, is_lines: bool) -> list[object]:
    """The values at the start of a file, from its first characters; the elements of a list count as values."""
    if is_lines or _is_lines(head.encode()):
        lines = head.splitlines()[:-1] or [head]  # the last line may be incomplete
        values = [value for value in map(_parse_start, lines) if value is not None]
    else:
        values = [_parse_start(head)]
    elements: list[object] = []
    for value in values:
        elements += value if isinstance(value, list) else [value]
    return elements


def _parse_start(text: str) -> object:
    """The first value of a text; if the text ends within it, all that is complete. None if it is not JSON.

    '[{"a": 1, "b": 2}, {"a": 3, "b' -> [{"a": 1, "b": 2}, {"a": 3}]
    """
    text = text.lstrip()
    try:
        return _DECODER.raw_decode(text)[0]
    except (ValueError, RecursionError):
        pass
    # Cut the text after the last opening bracket or before the last comma, and close what is open there.
    closers = ""
    cut = 0
    closers_at_cut = ""
    for match in _STRUCTURE.finditer(text):
        token = match[0]
        if token in "{[":
            closers = ("}" if token == "{" else "]") + closers
            cut = match.end()
            closers_at_cut = closers
        elif token in "}]":
            closers = closers[1:]
        elif token == ",":
            cut = match.start()
            closers_at_cut = closers
    try:
        return _DECODER.raw_decode(text[:cut] + closers_at_cut)[0]
    except (ValueError, RecursionError):
        return None


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
    """Yield the elements of one object's list `name`, one at a time; the object's other members are skipped."""
    object_place = f"value {scanner.count}"
    scanner.place, raw, keys, count = object_place, scanner.raw(), [], 0
    for key in scanner.members():
        keys.append(key)
        if key != name or scanner.peek() != "[":
            scanner.value()
            continue
        for element in scanner.elements():
            scanner.place = f"{object_place}, {name}[{count}]"
            count += 1
            yield from fields.element_documents(element, scanner.place, scanner.raw())
        if not count:  # an empty list: one empty document, so that the record is counted
            yield Document("", fields.source, object_place)
            count = 1
    if not count:
        yield BadRecord(fields.source, object_place, f"no list '{name}[]'; found {sorted(keys)[:12]}", raw)


class _Scanner:
    """Parses JSON values from a stream, holding only the current value in memory."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self.stream = stream
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self.text = ""
        self.at = 0
        self.start = 0
        self.at_end = False
        self.count = 0
        self.place = "beginning"

    def raw(self) -> bytes:
        """The start of the current value, for the quarantine."""
        return self.text[self.start : self.start + RAW_BYTES].encode(errors="backslashreplace")[:RAW_BYTES]

    def count_rest(self) -> int:
        """Bytes from the start of the current value to the end of the file."""
        count = len(self.text[self.start :].encode(errors="surrogateescape"))
        while block := self.stream.read1(BUFFER_BYTES):
            count += len(block)
        return count

    def read_more(self) -> bool:
        """Read more text: as much as is held already, so that a long value is not parsed again too often."""
        if self.at_end:
            return False
        self.text = self.text[self.start :]
        self.at = self.at - self.start
        self.start = 0
        if len(self.text) > records.MAX_RECORD_BYTES:
            raise UnreadableRecord(f"a value has more than {records.MAX_RECORD_BYTES:,} characters")
        block = self.stream.read1(max(BUFFER_BYTES, len(self.text)))
        self.at_end = not block
        self.text += self.decoder.decode(block, final=self.at_end)
        return not self.at_end

    def peek(self) -> str:
        """The next character that is not white space; '' at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
                self.at += 1
            self.start = self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.read_more():
                return ""

    def value(self) -> object:
        """Parse the value at the current position."""
        if not self.peek():
            raise UnreadableRecord("unexpected end of file")
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.start)
            except RecursionError:
                raise UnreadableRecord("JSON nested too deep") from None
            except json.JSONDecodeError as error:
                may_be_incomplete = error.pos >= len(self.text) - RETRY_CHARACTERS or error.msg.startswith(
                    "Unterminated string"
                )
                if not may_be_incomplete or not self.read_more():
                    place = f"at character {error.pos - self.start:,} of the value"
                    raise UnreadableRecord(f"not JSON: {error.msg.removesuffix(' at')} {place}") from None
            except ValueError as error:  # a number with more digits than Python accepts
                raise UnreadableRecord(f"not JSON: {error}") from None
            else:
                if not self._may_continue(value, end) or not self.read_more():
                    self.at = end
                    return value

    def _may_continue(self, value: object, end: int) -> bool:
        """True if a number may continue after the end of the buffer."""
        return isinstance(value, int | float) and not self.text[end : end + 400].lstrip("0123456789+-.eE")

    def elements(self) -> Iterator[object]:
        """Yield the elements of the array at the current position."""
        self.at += 1
        if self.peek() == "]":
            self.at += 1
            return
        while True:
            yield self.value()
            if self._expect(",]") == "]":
                return

    def members(self) -> Iterator[str]:
        """Yield the keys of the object at the current position; the caller reads each value."""
        self.at += 1
        if self.peek() == "}":
            self.at += 1
            return
        while True:
            key = self.value()
            if not isinstance(key, str):
                raise UnreadableRecord("not JSON: a key is not a string")
            self._expect(":")
            yield key
            if self._expect(",}") == "}":
                return

    def _expect(self, expected: str) -> str:
        found = self.peek()
        if not found or found not in expected:
            raise UnreadableRecord(
                f"not JSON: found {found!r}; expected one of {expected!r}" if found else "unexpected end of file"
            )
        self.at += 1
        return found
