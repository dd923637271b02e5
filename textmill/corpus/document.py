"""Document: one piece of text and where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
Turn = tuple[str, str]
"""Who speaks (system, user or assistant), and what is said."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text with the way back to its source."""

    text: str
    source: str
    """The file it was read from, as the user named it."""
    id: str
    """Its place there: 'line 17', 'section 3', 'page 1234'."""
    meta: str | None = None
    """Further fields of its record that were asked for, as a JSON object."""
    url: str | None = None
    """The address of a web page, where its record has one and a filter asks for it; not kept."""
    turns: tuple[Turn, ...] | None = None
    """Of a conversation: its turns, whose words `text` has one after the other."""
