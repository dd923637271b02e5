"""Text that was decoded in the wrong encoding, put right with ftfy."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_ENCODINGS = ("latin-1", "cp1252", "cp1250", "cp1251", "cp1253", "cp1254", "cp1257", "iso-8859-2", "mac-roman", "cp437")


def _characters(first: int, last: int) -> str:
    """Every character that one of the encodings has for these bytes, for a class of a regular expression."""
    characters = {
        bytes([byte]).decode(encoding, "ignore") for encoding in _ENCODINGS for byte in range(first, last + 1)
    }
    return "".join(map(re.escape, sorted(characters)))


# UTF-8 read as one byte a letter always shows the sign of a first byte before the sign of a following one; ftfy looks for
# more, at 1 MB/s, so it is shown only the lines where this stands. The space is a no-break one that someone has tidied.
# One class of signs comes first: with the branches there the search would be four times slower.
_SUSPECT = re.compile(
    f"[{_characters(0xC2, 0xF4)}\x80-\x9f](?:[{_characters(0x80, 0xBF)}]|(?<=[\x80-\x9f])|(?<=[ÂÃÄÅÎÏÐÑØÙâãïð]) )"
)  # fmt: skip


def repair(text: str) -> str:
    """UTF-8 that was read as Latin-1, Windows, Mac or DOS text becomes what it was."""
    if text.isascii() or not _SUSPECT.search(text):
        return text
    fix, fixer_config = _fixer()
    return "\n".join([fix(line, fixer_config) if _SUSPECT.search(line) else line for line in text.split("\n")])


@cache
def _fixer() -> tuple[Any, Any]:
    """ftfy and which of its mends are wanted: the encoding, and nothing that other rules do."""
    from ftfy import TextFixerConfig, fix_text

    off = dict.fromkeys(("unescape_html", "remove_terminal_escapes", "fix_latin_ligatures", "fix_character_width", "uncurl_quotes",
                         "fix_line_breaks", "remove_control_chars"), False)  # fmt: skip
    return fix_text, TextFixerConfig(**off, normalization=None)
