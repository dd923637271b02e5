"""Rules for single characters: line ends, control characters, Unicode forms, spaces, punctuation and width."""

from __future__ import annotations

import re
import unicodedata

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")
_PLAIN = re.compile("[\t\n -~\xa0-\U0010ffff]*+")  # one long match is twice as fast as a search without a hit
_HIDDEN = "\u00ad\u200b\u2060\u180e"
_ODD_SPACES = "\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f"
_PUNCTUATION = {
    **dict.fromkeys("“”„‟«»″〝〞", '"'),
    **dict.fromkeys("‘’‚‛‹›′", "'"),
    **dict.fromkeys("‐‑‒–—―−", "-"),
    "…": "...",
    "⋯": "...",
}
_WIDE = re.compile("[\uff01-\uff5e\u3000]")


def unify_newlines(text: str) -> str:
    """Replace CRLF, CR, NEL, LS and PS with LF."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if text.isascii():
        return text
    return text.replace("\x85", "\n").replace("\u2028", "\n").replace("\u2029", "\n")


def drop_controls(text: str) -> str:
    """Remove control characters (except newline and tab) and byte order marks; NUL, often a separator, becomes a
    space."""
    if "\ufeff" not in text and _PLAIN.fullmatch(text):
        return text
    return _CONTROL.sub("", text.replace("\x00", " "))


def to_nfc(text: str) -> str:
    """Convert to Unicode NFC: a letter and its accents become one character where possible."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def to_nfkc(text: str) -> str:
    """Convert to Unicode NFKC: NFC, and ligatures, circled and full-width characters become plain ones."""
    return text if text.isascii() else unicodedata.normalize("NFKC", text)


def replace_invisibles(text: str) -> str:
    """Remove soft hyphens, zero-width spaces and word joiners; replace unusual spaces with a space.

    The joiners that some scripts need are kept.
    """
    if text.isascii():
        return text
    for character in _HIDDEN:
        text = text.replace(character, "")
    for character in _ODD_SPACES:
        text = text.replace(character, " ")
    return text


def plain_punctuation(text: str) -> str:
    """Replace typographic quotes, dashes and ellipses with ASCII; Chinese, Japanese and Korean punctuation stays."""
    if text.isascii():
        return text
    for character, replacement in _PUNCTUATION.items():
        text = text.replace(character, replacement)
    return text


def to_half_width(text: str) -> str:
    """Replace full-width letters, digits, symbols and the ideographic space with ASCII."""
    if text.isascii() or not _WIDE.search(text):
        return text
    return _WIDE.sub(lambda found: " " if found[0] == "\u3000" else chr(ord(found[0]) - 0xFEE0), text)


def trim_spaces(text: str) -> str:
    """Remove spaces at line ends and white space around the text; keep at most one blank line in a row."""
    text = "\n".join([line.rstrip() for line in text.split("\n")])
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.strip()
