"""JSON lines: an object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator

from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.records import RAW, Bad, Unreadable, decoded, lines_of, refuse_long
from textmill.corpus.source import Piece, Range, Source
from textmill.corpus.sources import line_ranges
from textmill.corpus.text_fields import Fields, fields_of


def ranges(source: Source, documents: str) -> Iterator[Range] | None:
    """Whole lines."""
    return line_ranges(source)


def read(piece: Piece, config: CorpusConfig) -> Iterator[Document | Bad]:
    """A record a line; a blank line has no field and is empty text."""
    fields = fields_of(piece.source, config)
    for number, line, length in lines_of(piece):
        yield from line_records(line, length, f"line {number}", fields)


def line_records(line: bytes, length: int, place: str, fields: Fields) -> Iterator[Document | Bad]:
    """The documents of one line."""
    try:
        refuse_long(length)
        text = decoded(line)
        if text.isspace() or not text:
            yield Document("", fields.source, place)
            return
        value = parsed(text)
    except Unreadable as error:
        yield Bad(fields.source, place, str(error)[:RAW], line[:RAW])
        return
    yield from fields.documents(value, place, line)


def parsed(text: str) -> object:
    """A JSON value, or the reason why it is none."""
    try:
        value: object = json.loads(text)
    except RecursionError:
        raise Unreadable("JSON nested too deep") from None
    except json.JSONDecodeError as error:
        raise Unreadable(f"not JSON: {error.msg} at column {min(error.pos, len(text.rstrip())) + 1}") from None
    except ValueError as error:  # a number of more digits than Python reads
        raise Unreadable(f"not JSON: {error}") from None
    return value
