"""Cleaning rules: one small pure function each."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")
_PLAIN = re.compile("[\t\n -~\xa0-\U0010ffff]*+")  # one long match is twice as fast as a search that finds nothing


def compose(text: str) -> str:
    """Unicode's NFC form: a letter and its marks are one character where there is one."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def unify_newlines(text: str) -> str:
    """CRLF, CR, NEL, LS and PS become LF."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.isascii():
        return text
    return text.replace("\x85", "\n").replace("\u2028", "\n").replace("\u2029", "\n")


def drop_controls(text: str) -> str:
    """Control characters except newline and tab, and byte order marks, go; NUL, often a separator, becomes a space."""
    if "\ufeff" not in text and _PLAIN.fullmatch(text):
        return text
    return _CONTROL.sub("", text.replace("\x00", " "))


def trim_spaces(text: str) -> str:
    """No spaces at a line's end, at most one blank line in a row, nothing blank at either end."""
    text = "\n".join([line.rstrip() for line in text.split("\n")])
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.strip()


RULES: dict[str, Callable[[str], str]] = {
    "newlines": unify_newlines,
    "controls": drop_controls,
    "unicode": compose,
    "spaces": trim_spaces,
}
"""In the one order in which no rule leaves work for another: controls that are newlines are saved before controls
go, and a mark meets its letter only when the control between them is gone."""


def clean(text: str, rules: Collection[str]) -> str:
    """The text after these rules; in whatever order they are named, they run in the order of RULES."""
    for rule, function in RULES.items():
        if rule in rules:
            text = function(text)
    return text
