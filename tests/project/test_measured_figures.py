"""Tables have a header, and those of measurements say how to repeat them: a date, a script, the machine, versions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
UNITS = r"(?:(?:tokens|documents|MB)/s|GiB)"
MEASURED = re.compile(rf"\A.*(?:{UNITS}|\b(?:ms|seconds|MFU|valid loss)\b)|\d {UNITS}")
"""Matches a table with such a unit in its header, or after a number in any cell."""
NEEDED = {
    "a date": re.compile(r"\b20\d\d-\d\d-\d\d\b"),
    "a script or command": re.compile(r"\b(?:bench/\w|textmill \w|make \w|pytest )"),
    "a machine": re.compile(r"\b(?:H200|CPU|cores?)\b"),
    "versions": re.compile(r"\b(?:torch|Python|numpy|tokenizers) \d"),
}


def sections(text: str) -> Iterator[tuple[str, str, str]]:
    """Yield heading and body of each section, and the body together with the introductions of the sections above it."""
    parts = re.split(r"^(#{1,6}) (.*)\n", text, flags=re.MULTILINE)
    above: dict[int, str] = {}
    for marks, heading, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        above = {depth: other for depth, other in above.items() if depth < len(marks)}
        above[len(marks)] = body
        yield heading, body, "\n".join(above.values())


def lacking(text: str) -> dict[str, list[str]]:
    """What the sections with tables of measurements lack, by heading."""
    found = {}
    for heading, body, context in sections(text):
        tables = re.findall(r"(?:^\|.*\n)+", body + "\n", re.MULTILINE)
        if any(MEASURED.search(table) for table in tables):
            found[heading] = [name for name, pattern in NEEDED.items() if not pattern.search(context)]
    return {heading: missing for heading, missing in found.items() if missing}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_measured_figures_can_be_measured_again(page: Path) -> None:
    assert not lacking(page.read_text(encoding="utf-8"))


def test_what_is_lacking_is_found() -> None:
    table = "| program | tokens/s |\n|---|---|\n| ours | 12,345 |\n"
    assert lacking(f"# Page\n\n## Speed\n\nOne H200, torch 2.11:\n\n{table}") == {
        "Speed": ["a date", "a script or command"]
    }
    context = "# Page\n\nOne H200, 2026-11-18, torch 2.11, `python bench/train_gpu.py`\n\n"
    assert not lacking(f"{context}## Speed\n\n{table}")
    assert lacking(f"## Other\n\n{context[8:]}## Speed\n\n{table}").keys() == {"Speed"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_table_has_a_header(page: Path) -> None:
    """Without one, as after an empty line between two rows, rows are shown as lines of text."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert not [table for table in tables if not re.match(r"\|.*\n\|[-:| ]+\|\n", table)]
