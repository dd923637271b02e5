"""Read CSV and TSV files with a header row; a quoted field may span lines."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from textmill.config import CorpusConfig
from textmill.corpus import records
from textmill.corpus.document import Document
from textmill.corpus.records import (
    RAW_BYTES,
    BadRecord,
    UnreadableRecord,
    check_line_length,
    describe_encoding_error,
    read_lines,
)
from textmill.corpus.source import SourceChunk
from textmill.corpus.streams import stored_name
from textmill.corpus.text_fields import parse_text_key


def read(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """Yield one record per row; a row with a different number of fields than the header is a bad record."""
    fields, lines = parse_text_key(chunk.source, config), _LineReader(chunk)
    is_tab_separated = ".tsv" in stored_name(chunk.source.address).rpartition("/")[2]
    csv.field_size_limit(records.MAX_RECORD_BYTES)
    rows = csv.reader(lines, delimiter="\t" if is_tab_separated else ",", strict=True)
    header: list[str] | None = None
    while True:
        lines.start_row()
        try:
            row = next(rows)
            if not row:
                continue  # a blank line is not a row
            if header is None:
                header = [_text(name).strip() for name in row]
                continue
            if len(row) != len(header):
                raise UnreadableRecord(f"found {len(row)} fields; the header has {len(header)}: {header[:12]}")
            value = {name: _text(field) for name, field in zip(header, row, strict=True)}
        except StopIteration:
            return
        except csv.Error as error:
            yield BadRecord(chunk.source.name, lines.place, f"not CSV: {error}", lines.raw)
        except UnreadableRecord as error:
            yield BadRecord(chunk.source.name, lines.place, str(error)[:RAW_BYTES], lines.raw)
        else:
            yield from fields.documents(value, lines.place, lines.raw)


class _LineReader:
    """Lines for the csv module, with the place and the first bytes of the current row."""

    def __init__(self, chunk: SourceChunk) -> None:
        self.lines = read_lines(chunk)
        self.place, self.raw, self.at_row_start = "line 1", b"", True

    def start_row(self) -> None:
        self.at_row_start = True

    def __iter__(self) -> _LineReader:
        return self

    def __next__(self) -> str:
        number, line, length = next(self.lines)
        if self.at_row_start:
            self.place, self.raw, self.at_row_start = f"line {number}", line[:RAW_BYTES], False
        check_line_length(length)
        text = line.decode(errors="surrogateescape")
        return text.removeprefix("\ufeff") if number == 1 else text


def _text(field: str) -> str:
    try:
        field.encode()
    except UnicodeEncodeError as error:
        raw = field.encode(errors="surrogateescape")
        raise UnreadableRecord(
            describe_encoding_error(raw, ord(field[error.start]) & 0xFF, len(field[: error.start].encode()))
        ) from None
    return field
