"""Read JSON lines: one object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator

from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.records import BadRecord, UnreadableRecord, check_line_length, decode_utf8, line_ranges, read_lines
from textmill.corpus.source import ChunkRange, Source, SourceChunk
from textmill.corpus.text_fields import TextFields, parse_text_key


def ranges(source: Source, document_unit: str, chunk_bytes: int) -> Iterator[ChunkRange] | None:
    """Ranges of complete lines."""
    return line_ranges(source, chunk_bytes)


def read(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """Yield one record per line; a blank line is an empty document."""
    fields = parse_text_key(chunk.source, config)
    for number, line, length in read_lines(chunk):
        yield from line_records(line, length, f"line {number}", fields)


def line_records(line: bytes, length: int, place: str, fields: TextFields) -> Iterator[Document | BadRecord]:
    """Yield the documents of one line."""
    try:
        check_line_length(length)
        text = decode_utf8(line)
        if text.isspace() or not text:
            yield Document("", fields.source, place)
            return
        value = parse_json(text)
    except UnreadableRecord as error:
        yield BadRecord(fields.source, place, str(error), line, length)
        return
    yield from fields.documents(value, place, line)


def parse_json(text: str) -> object:
    """Parse a JSON value; raise UnreadableRecord with the reason if it is invalid."""
    try:
        value: object = json.loads(text)
    except RecursionError:
        raise UnreadableRecord("JSON nested too deep") from None
    except json.JSONDecodeError as error:
        column = min(error.pos, len(text.rstrip())) + 1
        raise UnreadableRecord(f"not JSON: {error.msg.removesuffix(' at')} at column {column}") from None
    except ValueError as error:  # a number with more digits than Python accepts
        raise UnreadableRecord(f"not JSON: {error}") from None
    return value
