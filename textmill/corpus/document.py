"""Document: a text with its source; and how a long text is cut into documents, at a blank line or the end of a line."""

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

# CR LF is one newline: the atomic group never splits it.
_NEWLINE = r"(?>\r\n|[\r\n])"
_LINE_END = re.compile(_NEWLINE)
_BLANK_LINE = re.compile(rf"{_NEWLINE}[ \t]*+{_NEWLINE}")
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


def section_limits(size: int) -> tuple[int, int, int]:
    """The size, soft limit and hard limit of sections of about `size` characters."""
    return size, 2 * size, 4 * size


def cut_into_sections(text: str, size: int) -> Iterator[str]:
    """The sections of a text in memory, the same as those of a file with this text."""
    start = 0
    while True:
        start = _LEADING.match(text, start).end()  # type: ignore[union-attr]
        end = _find_cut(text, start, *section_limits(size), at_end=True)
        if end is None:
            return
        if not text[start:end].isspace():
            yield text[start:end]
        start = end


def split_text(stream: io.BufferedReader, size: int, soft_limit: int, hard_limit: int) -> Iterator[str]:
    """Yield a stream's text in documents of about `size` characters; `_find_cut` decides where they end.

    Bytes that are not UTF-8 become lone surrogates, so that they spoil only their own document.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text, start, at_end, carriage_return = "", 0, False, b""
    if stream.peek(3)[:3] == codecs.BOM_UTF8:
        stream.read(3)
    while True:
        start = _LEADING.match(text, start).end()  # type: ignore[union-attr]
        end = _find_cut(text, start, size, soft_limit, hard_limit, at_end)
        if end is not None:
            if end > start and not text[start:end].isspace():
                yield text[start:end]
            start = end
        elif not at_end:
            text, start = text[start:], 0
            new_bytes = stream.read1(max(READ_BYTES, len(text)))
            at_end = not new_bytes
            new_bytes = carriage_return + new_bytes
            # Hold back a final CR: a cut must not depend on where a block of the file ends.
            carriage_return = b"\r" if new_bytes.endswith(b"\r") and not at_end else b""
            text += decoder.decode(new_bytes[: len(new_bytes) - len(carriage_return)], final=at_end)
        else:
            return


def _find_cut(text: str, start: int, size: int, soft_limit: int, hard_limit: int, at_end: bool) -> int | None:
    """Where the document at `start` ends; None if more text is needed to decide.

    It ends at the first blank line after `size` characters, else at the first line end after `soft_limit`, else at
    `hard_limit`. Only the text up to that point matters.
    """
    if found := _BLANK_LINE.search(text, start + size - 1, start + soft_limit):
        return found.end()
    if len(text) - start >= soft_limit:
        if found := _LINE_END.search(text, start + soft_limit - 1, start + hard_limit):
            return found.end()
        if len(text) - start >= hard_limit:
            return start + hard_limit
    return len(text) if at_end and len(text) > start else None
