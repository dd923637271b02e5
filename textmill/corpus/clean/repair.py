"""Repair text that was decoded with the wrong encoding, with ftfy: "schÃ¶n" -> "schön"."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_ENCODINGS = ("latin-1", "cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1257", "iso-8859-2", "mac-roman", "cp437")


def _characters(first: int, last: int) -> str:
    """All characters that the encodings assign to these bytes, for a regular expression class."""
    characters = {
        bytes([byte]).decode(encoding, "ignore") for encoding in _ENCODINGS for byte in range(first, last + 1)
    }
    return "".join(map(re.escape, sorted(characters)))


# UTF-8 decoded with a one-byte encoding always shows the character of a lead byte before that of a continuation byte.
# ftfy searches for more, but at 1 MB/s, so it gets only lines with this pattern. The space stands for a no-break space
# that was cleaned up. The pattern starts with a single character class because alternatives there would make the search
# four times slower.
_SUSPECT = re.compile(
    f"[{_characters(0xC2, 0xF4)}\x80-\x9f](?:[{_characters(0x80, 0xBF)}]|(?<=[\x80-\x9f])|(?<=[ÂÃÄÅÎÏÐÑØÙâãïð]) )"
)


_SUSPECT_PAIRS = frozenset(
    lead + continuation
    for encoding in _ENCODINGS
    for lead in bytes(range(0xC2, 0xF5)).decode(encoding, "ignore")
    for continuation in bytes(range(0x80, 0xC0)).decode(encoding, "ignore")
)
"""Lead and continuation bytes in one encoding. In two encodings, as ğ and ü in Turkish, they are no decoded UTF-8."""


_SINGLE = re.compile("[\x80-\x9f\ud800-\udfff]")
"""Control characters and surrogates that ftfy repairs one by one."""


def repair(text: str) -> str:
    """Repair UTF-8 that was decoded as Latin-1, Windows, Mac or DOS text."""
    if text.isascii():
        return text
    suspect = _SUSPECT.search(text)
    if not suspect:
        return text
    is_bad, fix, fixer_config = _fixer()
    pieces = []  # the text up to `end` is in the pieces
    end = 0
    while suspect:
        line_start = text.rfind("\n", 0, suspect.start()) + 1
        line_end = text.find("\n", suspect.start())
        line = text[line_start : line_end if line_end >= 0 else len(text)]
        pieces.append(text[end:line_start])
        # ftfy leaves other lines as they are, after more work.
        needs_repair = (_has_suspect(line) and is_bad(line)) or _SINGLE.search(line)
        pieces.append(fix(line, fixer_config) if needs_repair else line)
        end = line_start + len(line)
        suspect = _SUSPECT.search(text, end)
    return "".join([*pieces, text[end:]])


def _has_suspect(line: str) -> bool:
    """Whether a line has a character that stands for a byte by itself or before a space, or a suspect pair."""
    suspect = _SUSPECT.search(line)
    while suspect:
        if suspect[0] in _SUSPECT_PAIRS or suspect[0][1:] in ("", " "):
            return True
        suspect = _SUSPECT.search(line, suspect.start() + 1)
    return False


@cache
def _fixer() -> tuple[Any, Any, Any]:
    """ftfy's functions to judge and to repair a text, and a configuration that repairs only the encoding."""
    from ftfy import TextFixerConfig, fix_text
    from ftfy.badness import is_bad

    off = dict.fromkeys(
        (
            "unescape_html",
            "remove_terminal_escapes",
            "fix_latin_ligatures",
            "fix_character_width",
            "uncurl_quotes",
            "fix_line_breaks",
            "remove_control_chars",
        ),
        False,
    )
    return is_bad, fix_text, TextFixerConfig(**off, normalization=None)
