"""Read CoNLL files: a word and its label on each line, a blank line after each sentence."""

from __future__ import annotations

from collections.abc import Iterator

from textmill.corpus.labelled.example import Example, format_place
from textmill.corpus.records import UnreadableRecord, check_line_length, decode_utf8, read_lines
from textmill.corpus.source import Source
from textmill.corpus.sources import split_into_chunks
from textmill.errors import TextmillError

DOCUMENT_START = "-DOCSTART-"


def read_conll(source: Source) -> Iterator[Example]:
    """The sentences of a file. The word is the first column, its label the last; one column alone has no labels."""
    rows: list[list[str]] = []
    first = width = 0
    for number, line in _read_lines(source):
        columns = line.split("\t") if "\t" in line else line.split()
        if not line.strip() or columns[0] == DOCUMENT_START:
            if rows:
                yield _to_example(source.name, first, rows)
            rows = []
            continue
        if not rows and _is_comment(columns, width):
            continue
        width = width or len(columns)
        if len(columns) != width:
            raise TextmillError(
                f"{source.name}:{number}: found {len(columns)} columns, the lines before have {width}; "
                "write a word and its label on each line, with a tab or spaces between them"
            )
        if width > 1 and not columns[-1].strip():
            raise TextmillError(f"{source.name}:{number}: the word '{columns[0]}' has no label; add it")
        first = first if rows else number
        rows.append(columns)
    if rows:
        yield _to_example(source.name, first, rows)


def _is_comment(columns: list[str], width: int) -> bool:
    """Whether a line before a sentence is a comment such as '# id = 3', not a word."""
    return columns[0].startswith("#") and (" " in columns[0] or len(columns) != (width or 2))


def _to_example(source: str, first: int, rows: list[list[str]]) -> Example:
    labels = tuple(row[-1].strip() for row in rows) if len(rows[0]) > 1 else None
    return Example(source, f"line {first}", tuple(row[0] for row in rows), labels)


def _read_lines(source: Source) -> Iterator[tuple[int, str]]:
    for chunk in split_into_chunks([source], "line"):
        for number, line, length in read_lines(chunk):
            try:
                check_line_length(length)
                yield number, decode_utf8(line).rstrip("\r\n")
            except UnreadableRecord as error:
                raise TextmillError(f"{format_place(source.name, f'line {number}')}: {error}") from None
