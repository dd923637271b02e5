"""Document: a text with its source; and how a long text is cut into sections, at a blank line or the end of a line."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
Turn = tuple[str, str]
"""The role (system, user or assistant) and the text of one turn."""
READ_BYTES = 1 << 16
"""Bytes read at a time."""
MAX_BLOCK_CHARACTERS = 8 << 20
"""A block between blank lines is cut after this many characters."""
SectionLimits = tuple[int, int, int]
"""The size, soft limit and hard limit of a section in characters; see `_find_cut`."""

# CR LF is one newline: the atomic group never splits it.
_NEWLINE = r"(?>\r\n|[\r\n])"
_LINE_END = re.compile(_NEWLINE)
_BLANK_LINE = re.compile(rf"{_NEWLINE}[ \t]*+{_NEWLINE}")
# As far as possible: a space, or in scripts without spaces a mark between sentences or their parts.
_WORD_END = re.compile(r".*\s|.*[。．！？；，、।။]", re.DOTALL)
_LEADING = re.compile(rf"(?:[ \t]*+{_NEWLINE})*+")


@dataclass(frozen=True, slots=True)
class Document:
    """A text and where it came from."""

    text: str
    source: str
    """The name of its source, as the user gave it."""
    id: str
    """Its place in the source: 'line 17', 'section 3', 'page 1234'."""
    meta: str | None = None
    """The fields of `corpus.keep_fields`, as a JSON object."""
    url: str | None = None
    """The URL of a web page, if a filter needs it; not stored."""
    turns: tuple[Turn, ...] | None = None
    """The turns of a conversation; `text` holds them joined."""


def limits_of(unit: str, section_chars: int) -> SectionLimits:
    """The limits of sections of about `section_chars` characters, or of blocks between blank lines."""
    if unit == "block":
        return 1, MAX_BLOCK_CHARACTERS, 2 * MAX_BLOCK_CHARACTERS
    return section_chars, 2 * section_chars, 4 * section_chars


def cut_into_sections(text: str, limits: SectionLimits) -> list[str]:
    """The sections of a text in memory, the same as those of a file with this text."""
    sections, _ = _take_sections(text, limits, at_end=True)
    return sections


def read_sections(stream: io.BufferedReader, limits: SectionLimits) -> Iterator[str]:
    """Yield the sections of a stream's text.

    Bytes that are not UTF-8 become lone surrogates, so that they spoil only their own section.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    if stream.peek(3)[:3] == codecs.BOM_UTF8:
        stream.read(3)
    rest = ""
    carriage_return = b""
    at_end = False
    while not at_end:
        new_bytes = stream.read1(max(READ_BYTES, len(rest)))
        at_end = not new_bytes
        new_bytes = carriage_return + new_bytes
        # Hold back a final CR: a cut must not depend on where a block of the file ends.
        carriage_return = b"\r" if new_bytes.endswith(b"\r") and not at_end else b""
        new_text = decoder.decode(new_bytes[: len(new_bytes) - len(carriage_return)], final=at_end)
        sections, rest = _take_sections(rest + new_text, limits, at_end)
        yield from sections


def _take_sections(text: str, limits: SectionLimits, at_end: bool) -> tuple[list[str], str]:
    """The sections that a text certainly begins with, and the rest; `at_end`: no text follows, so all is taken."""
    sections: list[str] = []
    start = 0
    while True:
        start = _LEADING.match(text, start).end()  # type: ignore[union-attr]
        end = _find_cut(text, start, limits, at_end)
        if end is None:
            return sections, text[start:]
        if not text[start:end].isspace():
            sections.append(text[start:end])
        start = end


def _find_cut(text: str, start: int, limits: SectionLimits, at_end: bool) -> int | None:
    """Where the section at `start` ends; None if more text is needed to decide.

    It ends at the first blank line after `size` characters, else at the first line end after `soft_limit`, else between
    words, at the last place before `hard_limit`. Only the text up to that point matters.
    """
    size, soft_limit, hard_limit = limits
    if found := _BLANK_LINE.search(text, start + size - 1, start + soft_limit):
        return found.end()
    if len(text) - start >= soft_limit:
        if found := _LINE_END.search(text, start + soft_limit - 1, start + hard_limit):
            return found.end()
        if len(text) - start >= hard_limit:
            found = _WORD_END.match(text, start + soft_limit - 1, start + hard_limit)
            return found.end() if found else start + hard_limit
    return len(text) if at_end and len(text) > start else None
