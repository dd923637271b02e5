"""Detect how a CSV or TSV file is written from a sample: its delimiter, its quotes and its header."""

from __future__ import annotations

import codecs
import csv
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from textmill.config import CorpusConfig
from textmill.corpus.streams import stored_name

DELIMITERS = ",;\t|"
SAMPLE_ROWS = 200
MAX_NAME = 64
"""A longer cell in the first row is data, not the name of a column."""
_NUMBER = re.compile(r"[-+]?[\d.,:/ -]*\d[\d.,:/ %-]*")


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
    """The dialect of a file: what the settings say, and for those that are auto what its first bytes show."""
    quotes = None if config.quoting == "auto" else config.quoting == "double"
    sample = head.removeprefix(codecs.BOM_UTF8).decode(errors="replace")
    found = detect_dialect(address, sample, config.text_key, config.delimiter, quotes)
    return found if config.header == "auto" else replace(found, header=config.header)


def detect_dialect(
    address: str, sample: str, text_key: str = "text", delimiter: str = "auto", quoting: bool | None = None
) -> Dialect:
    """The dialect of a file, from its name and its first lines; a last, incomplete line is ignored.

    `text_key`: a first row with this name is a header. `delimiter`, `quoting`: not detected if they are given.
    """
    end = sample.rfind("\n") + 1
    lines = (sample[:end] if end else sample).splitlines(keepends=True)[: 4 * SAMPLE_ROWS]
    if delimiter == "auto":
        usual = "\t" if ".tsv" in stored_name(address).rpartition("/")[2] else ","
        delimiter = max(DELIMITERS, key=lambda char: (_agreement(lines, char), char == usual))
    dialect = Dialect(delimiter, _uses_quotes(lines, delimiter) if quoting is None else quoting, header=True)
    rows = dialect.parse(lines)
    return replace(dialect, header=not rows or _is_header(rows, text_key))


def column_names(count: int) -> list[str]:
    """The names of columns without a header; a single column is the text."""
    return [f"column{number}" for number in range(1, count + 1)] if count > 1 else ["text"]


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
