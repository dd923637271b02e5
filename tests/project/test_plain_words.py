"""The package uses the terms of the field, not private words, in names, messages and comments."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "textmill"
PRIVATE = "anew apart asked house kin mend mended mends onto parted peer peers room rooms said told wholeness".split()
"""Words that a reader new to the code cannot understand; docs/glossary.md has the terms to use."""
WORD = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(PRIVATE)}|{'|'.join(map(str.capitalize, PRIVATE))})(?![a-z])")


def test_package_has_no_private_words() -> None:
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".html", ".js", ".css")]
    assert len(files) > 300
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {word}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for word in WORD.findall(line)
    ]
    assert not found, "\n".join(found)


def test_search_finds_private_words() -> None:
    assert WORD.findall("make_room(self.askedFor) told Peers; rooming, kind, append") == [
        "room",
        "asked",
        "told",
        "Peers",
    ]
