"""WikiExtractor's output: <doc id= url= title=> blocks, or its JSON lines; a record a page."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from textmill.config import CorpusConfig
from textmill.corpus import records
from textmill.corpus.document import Document
from textmill.corpus.formats import jsonl
from textmill.corpus.records import RAW, Bad, Unreadable, decoded, lines_of, refuse_long
from textmill.corpus.source import Piece
from textmill.corpus.text_fields import Fields, fields_of

_START = re.compile(rb"\s*<doc( [^>]*)>\s*")
_FACT = re.compile(r'(\w+)="([^"]*)"')


def read(piece: Piece, config: CorpusConfig) -> Iterator[Document | Bad]:
    """Pages with the fields id, url, title and text; the title is kept as metadata where nothing else is asked for."""
    fields = fields_of(piece.source, config, keep=("title",))
    page: _Page | None = None
    for number, line, length in lines_of(piece):
        bare = line.strip()
        if page is None and bare.startswith(b"{"):
            yield from jsonl.line_records(line, length, f"line {number}", fields)
        elif page is None and (start := _START.fullmatch(line)):
            page = _Page(number, start[1])
        elif page is None:
            if bare:
                yield Bad(piece.source.name, f"line {number}", "text outside of a <doc> block", line[:RAW])
        elif bare == b"</doc>":
            yield from page.documents(fields)
            page = None
        else:
            page.add(line, length)
    if page is not None:
        yield Bad(piece.source.name, f"line {page.number}", "a <doc> block without its end", page.head)


class _Page:
    """A block that is being read."""

    def __init__(self, number: int, head: bytes) -> None:
        self.number, self.head, self.size = number, head[:RAW], 0
        self.lines: list[bytes] = []

    def add(self, line: bytes, length: int) -> None:
        self.size += length
        if self.size <= records.MAX_RECORD:
            self.lines.append(line)

    def documents(self, fields: Fields) -> Iterator[Document | Bad]:
        place = f"line {self.number}"
        try:
            refuse_long(self.size)
            page = {name: html.unescape(value) for name, value in _FACT.findall(decoded(self.head))}
            page["text"] = html.unescape(decoded(b"".join(self.lines)))
            place = f"page {page['id']}" if "id" in page else place
        except Unreadable as error:
            yield Bad(fields.source, place, str(error), self.head)
            return
        yield from fields.documents(page, place, self.head)
