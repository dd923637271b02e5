"""Read CSV and TSV files; a quoted field may span lines, and after a stray quote reading goes on at the next line.

The delimiter, the quotes and the header are detected from a sample. `csv.Sniffer` is not used: it takes any character
for a delimiter, and one stray quote misleads it.
"""

from __future__ import annotations

import codecs
import csv
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from textmill.config import CorpusConfig
from textmill.corpus import records
from textmill.corpus.document import Document
from textmill.corpus.records import RAW_BYTES, BadRecord, UnreadableRecord, check_line_length, check_utf8, read_lines
from textmill.corpus.source import SourceChunk
from textmill.corpus.streams import read_head, stored_name
from textmill.corpus.text_fields import TextFields, parse_text_key
from textmill.errors import TextmillError

MAX_ROW_BYTES = 16 << 20
"""A row that spans lines and is longer than this was opened by a stray quote; a row of one line may be longer."""
DELIMITERS = ",;\t|"
SAMPLE_ROWS = 200
MAX_NAME = 64
"""A longer cell in the first row is data, not the name of a column."""
_NUMBER = re.compile(r"[-+]?[\d.,:/ -]*\d[\d.,:/ %-]*")


def read(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """Yield one record per row; a row with a different number of fields than the header is a bad record."""
    fields = parse_text_key(chunk.source, config)
    dialect = find_dialect(chunk.source.address, read_head(chunk.source), config)
    csv.field_size_limit(records.MAX_RECORD_BYTES)
    lines = _LineReader(chunk)
    rows = csv.reader(lines, delimiter=dialect.delimiter, quoting=dialect.quoting_rule, strict=True)
    header: list[str] | None = None
    while True:
        lines.start_row()
        try:
            row = next(rows)
            if not row:
                continue  # a blank line is not a row
            if header is None:
                header = _column_names(row, dialect, fields)
                if dialect.header:
                    continue
            if len(row) != len(header):
                raise UnreadableRecord(f"found {len(row)} fields; the header has {len(header)}: {header[:12]}")
            for field in row:
                check_utf8(field)
            value = dict(zip(header, row, strict=True))
        except StopIteration:
            return
        except csv.Error as error:
            lines.resume_at_second_line()
            yield lines.bad_record(f"not CSV: {error}")
        except UnreadableRecord as error:
            if header is not None and lines.is_stray_quote(dialect, len(header)):
                lines.resume_at_second_line()
            yield lines.bad_record(str(error))
        else:
            yield from fields.documents(value, lines.place, lines.row[0][:RAW_BYTES])


class _LineReader:
    """Lines for the csv module; the lines of the current row are kept, so that they can be read again."""

    def __init__(self, chunk: SourceChunk) -> None:
        self.source, self.lines = chunk.source.name, read_lines(chunk)
        self.again: deque[tuple[int, bytes, int]] = deque()
        """Lines that were part of a broken row and are read once more."""
        self.numbers: list[int] = []
        self.row: list[bytes] = []
        self.row_bytes = 0

    def start_row(self) -> None:
        self.numbers = []
        self.row = []
        self.row_bytes = 0

    @property
    def place(self) -> str:
        """Where the current row starts."""
        return f"line {self.numbers[0] if self.numbers else 1}"

    def bad_record(self, reason: str) -> BadRecord:
        """The current row as a bad record."""
        return BadRecord(self.source, self.place, reason, b"".join(self.row), max(self.row_bytes, 1))

    def resume_at_second_line(self) -> None:
        """Give up the first line of the current row only."""
        rest = zip(self.numbers[1:], self.row[1:], map(len, self.row[1:]), strict=True)
        self.again.extendleft(reversed(list(rest)))
        self.row_bytes -= sum(map(len, self.row[1:]))
        del self.numbers[1:], self.row[1:]

    def is_stray_quote(self, dialect: Dialect, columns: int) -> bool:
        """True if the first line of the current row is complete when its quotes are read as characters."""
        return len(self.row) > 1 and any(
            len(row) == columns
            for row in Dialect(dialect.delimiter, False, False).parse([self._decode(self.row[0], 0)])
        )

    def __iter__(self) -> _LineReader:
        return self

    def __next__(self) -> str:
        number, line, length = self.again.popleft() if self.again else next(self.lines)
        self.numbers.append(number)
        self.row.append(line)
        self.row_bytes += length
        check_line_length(length)
        if self.row_bytes > MAX_ROW_BYTES and len(self.row) > 1:
            raise csv.Error(f"a quote opens a field that is not closed within {MAX_ROW_BYTES:,} bytes")
        return self._decode(line, number)

    def _decode(self, line: bytes, number: int) -> str:
        text = line.decode(errors="surrogateescape")
        return text.removeprefix("\ufeff") if number == 1 else text


def _column_names(row: list[str], dialect: Dialect, fields: TextFields) -> list[str]:
    """The names in the header; of equal names that are not read, all but the first get a number."""
    if not dialect.header:
        return column_names(len(row))
    for name in row:
        check_utf8(name)
    names = [name.strip() for name in row]
    seen: Counter[str] = Counter()
    read_columns = fields.columns(names)
    for place, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1 and name in read_columns:
            raise TextmillError(
                f"{fields.source}: the header has the column '{name}' twice (columns {names.index(name) + 1} and "
                f"{place + 1}); rename one of them"
            )
    counted: Counter[str] = Counter()
    for place, name in enumerate(names):
        counted[name] += 1
        names[place] = name if counted[name] == 1 else f"{name} ({counted[name]})"
    return names


def column_names(count: int) -> list[str]:
    """The names of columns without a header; a single column is the text."""
    return [f"column{number}" for number in range(1, count + 1)] if count > 1 else ["text"]


@dataclass(frozen=True)
class Dialect:
    """How the rows of a file are written."""

    delimiter: str
    quoting: bool
    """True if double quotes may enclose a field."""
    header: bool
    """True if the first row names the columns."""

    def parse(self, lines: Sequence[str]) -> list[list[str]]:
        """The rows of a sample; rows that cannot be parsed are left out."""
        rows: list[list[str]] = []
        reader = csv.reader(lines, delimiter=self.delimiter, quoting=self.quoting_rule, strict=False)
        while len(rows) < SAMPLE_ROWS:
            try:
                rows.append(next(reader))
            except StopIteration:
                break
            except csv.Error:
                continue
        return [row for row in rows if row]

    @property
    def quoting_rule(self) -> Literal[0, 3]:
        """The quoting of the csv module."""
        return csv.QUOTE_MINIMAL if self.quoting else csv.QUOTE_NONE

    def __str__(self) -> str:
        name = {"\t": "tab", ",": "comma", ";": "semicolon", "|": "vertical bar", " ": "space"}
        parts = [f"delimiter {name.get(self.delimiter, self.delimiter)}"]
        parts.append("double quotes" if self.quoting else "no quotes")
        return ", ".join([*parts, "a header" if self.header else "no header"])


def find_dialect(address: str, head: bytes, config: CorpusConfig) -> Dialect:
    """The dialect of a file: what the settings say, and for those that are auto what its name and first lines show.

    A last, incomplete line is ignored. A first row with `corpus.text_key` is a header."""
    sample = head.removeprefix(codecs.BOM_UTF8).decode(errors="replace")
    end = sample.rfind("\n") + 1
    lines = (sample[:end] if end else sample).splitlines(keepends=True)[: 4 * SAMPLE_ROWS]
    delimiter = config.delimiter
    if delimiter == "auto":
        usual = "\t" if ".tsv" in stored_name(address).rpartition("/")[2] else ","
        delimiter = max(DELIMITERS, key=lambda char: (_agreement(lines, char), char == usual))
    has_quotes = _uses_quotes(lines, delimiter) if config.quoting == "auto" else config.quoting == "double"
    dialect = Dialect(delimiter, has_quotes, header=True)
    if config.header != "auto":
        return replace(dialect, header=config.header)
    rows = dialect.parse(lines)
    return replace(dialect, header=not rows or _is_header(rows, config.text_key))


def _agreement(lines: Sequence[str], delimiter: str) -> float:
    """The fraction of rows with the most common number of fields, with or without quotes; 0 if that is one field."""
    fractions = [0.0]
    for quoting in (True, False):  # one stray quote must not hide the rest of the sample
        widths = Counter(len(row) for row in Dialect(delimiter, quoting, True).parse(lines))
        width, count = widths.most_common(1)[0] if widths else (1, 0)
        fractions.append(0.0 if width == 1 else count / widths.total())
    return max(fractions)


def _uses_quotes(lines: Sequence[str], delimiter: str) -> bool:
    """False only if quotes occur, and fields that start with one never end with one."""
    quote = re.escape('"')
    start = re.compile(rf"(?:^|{re.escape(delimiter)}){quote}")
    stop = re.compile(rf"{quote}(?:{re.escape(delimiter)}|[\r\n]*$)")
    opened = sum(bool(start.search(line)) for line in lines)
    return not (opened > 2 and not any(stop.search(line) for line in lines))


def _is_header(rows: list[list[str]], text_key: str) -> bool:
    """True unless the first row looks like data: it has numbers above numbers, empty or very long cells."""
    first = [cell.strip().removeprefix("\ufeff") for cell in rows[0]]
    wanted = {part.strip().partition(".")[0].partition("[")[0] for part in text_key.split("+")}
    if wanted & set(first):
        return True
    if any(len(cell) > MAX_NAME or "\n" in cell for cell in first):
        return False
    others = [row for row in rows[1:] if len(row) == len(first)]
    return not any(
        _NUMBER.fullmatch(cell) and others and all(_NUMBER.fullmatch(row[place].strip()) for row in others)
        for place, cell in enumerate(first)
    )
