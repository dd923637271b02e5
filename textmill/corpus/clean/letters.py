"""Rules that change single characters: line ends, controls, normal forms, odd spaces, punctuation, widths."""

from __future__ import annotations

import re
import unicodedata

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff]")
_PLAIN = re.compile("[\t\n -~\xa0-\U0010ffff]*+")  # one long match is twice as fast as a search that finds nothing
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


def to_nfc(text: str) -> str:
    """Unicode's NFC form: a letter and its marks are one character where there is one."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def to_nfkc(text: str) -> str:
    """Unicode's NFKC form: NFC, and ligatures, circled and full-width signs become plain ones."""
    return text if text.isascii() else unicodedata.normalize("NFKC", text)


def replace_invisibles(text: str) -> str:
    """Soft hyphens, zero-width spaces and word joiners go; no-break and other odd spaces become a space; joiners of scripts stay."""
    if text.isascii():
        return text
    for letter in _HIDDEN:
        text = text.replace(letter, "")
    for letter in _ODD_SPACES:
        text = text.replace(letter, " ")
    return text


def plain_punctuation(text: str) -> str:
    """Typographic quotes, dashes and ellipses become ASCII's; the punctuation of Chinese, Japanese and Korean stays."""
    if text.isascii():
        return text
    for letter, plain in _PUNCTUATION.items():
        text = text.replace(letter, plain)
    return text


def to_half_width(text: str) -> str:
    """Full-width letters, digits, signs and the ideographic space become ASCII."""
    if text.isascii() or not _WIDE.search(text):
        return text
    return _WIDE.sub(lambda found: " " if found[0] == "\u3000" else chr(ord(found[0]) - 0xFEE0), text)


def trim_spaces(text: str) -> str:
    """No spaces at a line's end, at most one blank line in a row, nothing blank at either end."""
    text = "\n".join([line.rstrip() for line in text.split("\n")])
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.strip()
