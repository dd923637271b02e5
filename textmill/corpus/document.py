"""Document: a text with its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
Turn = tuple[str, str]
"""The role (system, user or assistant) and the text of one turn."""


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
