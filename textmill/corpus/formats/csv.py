"""CSV and TSV with a header row: a record a row, a quoted field over several lines included."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from textmill.config import CorpusConfig
from textmill.corpus import records
from textmill.corpus.document import Document
from textmill.corpus.records import RAW, Bad, Unreadable, lines_of, not_utf8, refuse_long
from textmill.corpus.source import Piece
from textmill.corpus.streams import stored_name
from textmill.corpus.text_fields import fields_of


def read(piece: Piece, config: CorpusConfig) -> Iterator[Document | Bad]:
    """Rows by the names of the header; one with more or fewer fields than the header is bad, never guessed at."""
    fields, lines = fields_of(piece.source, config), _Lines(piece)
    tabs = ".tsv" in stored_name(piece.source.address).rpartition("/")[2]
    csv.field_size_limit(records.MAX_RECORD)
    rows = csv.reader(lines, delimiter="\t" if tabs else ",", strict=True)
    header: list[str] | None = None
    while True:
        lines.begin()
        try:
            row = next(rows)
            if not row:
                continue  # a blank line is no row
            if header is None:
                header = [_text(name).strip() for name in row]
                continue
            if len(row) != len(header):
                raise Unreadable(f"found {len(row)} fields; the header has {len(header)}: {header[:12]}")
            value = {name: _text(field) for name, field in zip(header, row, strict=True)}
        except StopIteration:
            return
        except csv.Error as error:
            yield Bad(piece.source.name, lines.place, f"not CSV: {error}", lines.raw)
        except Unreadable as error:
            yield Bad(piece.source.name, lines.place, str(error)[:RAW], lines.raw)
        else:
            yield from fields.documents(value, lines.place, lines.raw)


class _Lines:
    """Lines as the csv module takes them, with the place and the bytes of the row at hand."""

    def __init__(self, piece: Piece) -> None:
        self.lines = lines_of(piece)
        self.place, self.raw, self.fresh = "line 1", b"", True

    def begin(self) -> None:
        self.fresh = True

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        number, line, length = next(self.lines)
        if self.fresh:
            self.place, self.raw, self.fresh = f"line {number}", line[:RAW], False
        refuse_long(length)
        text = line.decode(errors="surrogateescape")
        return text.removeprefix("\ufeff") if number == 1 else text


def _text(field: str) -> str:
    try:
        field.encode()
    except UnicodeEncodeError as error:
        raw = field.encode(errors="surrogateescape")
        raise Unreadable(not_utf8(raw, ord(field[error.start]) & 0xFF, len(field[: error.start].encode()))) from None
    return field
