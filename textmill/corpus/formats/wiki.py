"""Read WikiExtractor output, <doc id= url= title=> blocks or JSON lines; one record per page."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from textmill.config import CorpusConfig
from textmill.corpus import records
from textmill.corpus.document import Document
from textmill.corpus.formats import jsonl
from textmill.corpus.records import BadRecord, UnreadableRecord, check_line_length, decode_utf8, read_lines
from textmill.corpus.source import SourceChunk
from textmill.corpus.text_fields import TextFields, parse_text_key

_START = re.compile(rb"\s*<doc( [^>]*)>\s*")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def read(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """Yield pages with the fields id, url, title and text; `title` is kept as metadata by default."""
    fields = parse_text_key(chunk.source, config, kept_fields=("title",))
    page: _Page | None = None
    for number, line, length in read_lines(chunk):
        stripped = line.strip()
        if page is None and stripped.startswith(b"{"):
            yield from jsonl.line_records(line, length, f"line {number}", fields)
        elif page is None and (start := _START.fullmatch(line)):
            page = _Page(number, start[1])
        elif page is None:
            if stripped:
                yield BadRecord(chunk.source.name, f"line {number}", "text outside a <doc> block", line)
        elif stripped == b"</doc>":
            yield from page.documents(fields)
            page = None
        else:
            page.add(line, length)
    if page is not None:
        yield BadRecord(chunk.source.name, f"line {page.number}", "<doc> block without </doc>", page.head)


class _Page:
    """A <doc> block while it is read."""

    def __init__(self, number: int, head: bytes) -> None:
        self.number = number
        self.head = head
        self.size = 0
        self.lines: list[bytes] = []

    def add(self, line: bytes, length: int) -> None:
        self.size += length
        if self.size <= records.MAX_RECORD_BYTES:
            self.lines.append(line)

    def documents(self, fields: TextFields) -> Iterator[Document | BadRecord]:
        place = f"line {self.number}"
        try:
            check_line_length(self.size)
            page = {name: html.unescape(value) for name, value in _ATTRIBUTE.findall(decode_utf8(self.head))}
            page["text"] = html.unescape(decode_utf8(b"".join(self.lines)))
            place = f"page {page['id']}" if "id" in page else place
        except UnreadableRecord as error:
            yield BadRecord(fields.source, place, str(error), self.head)
            return
        yield from fields.documents(page, place, self.head)
