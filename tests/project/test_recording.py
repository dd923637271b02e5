"""The recorder of the README's terminal: control sequences as ECMA-48 defines them, and a real command."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

from bench.record_terminal import COLORS, PAUSE, Screen, draw, join, record, shorten


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("one\r\ntwo\r\n", ["one", "two"]),
        ("10%\r100%\r\n", ["100%"]),
        ("step 10\r\x1b[2Kdone\r\n", ["done"]),
        ("bar one\r\nbar two\r\n\x1b[2A\x1b[KONE\x1b[B\r\x1b[2C", ["ONE", "bar two"]),
        ("\x1b[?25la\bb\x1b[?25h", ["b"]),
        ("123456789012", ["1234567890", "12"]),
    ],
    ids=["lines", "carriage return", "erased line", "cursor up and down", "backspace", "a long line"],
)
def test_a_screen_shows_what_a_terminal_shows(written: str, shown: list[str]) -> None:
    screen = Screen(10)
    screen.write(written)
    assert ["".join(letter for letter, _ in line) for line in screen.shown()] == shown


def test_colors_are_kept() -> None:
    screen = Screen(10)
    screen.write("\x1b[1;32mgo\x1b[0m on")
    assert screen.shown() == [tuple(zip("go on", [COLORS[2]] * 2 + [""] * 3, strict=True))]


def test_a_real_command_becomes_an_animation(tmp_path: Path) -> None:
    script = "import sys; print(sys.stdout.isatty(), 3 < 4)"
    events = join([record(f"{sys.executable} -c '{script}'", tmp_path, 200, 5)] * 2)
    assert max(b[0] - a[0] for a, b in pairwise(events)) <= PAUSE + 1e-9
    assert shorten(events, 0.5)[-1][0] == pytest.approx(0.5)
    root = ET.fromstring(draw(events, 200, 5))
    texts = ["".join(one.itertext()).replace("\u00a0", " ") for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("True True") == 2
    assert any(one.endswith("print(sys.stdout.isatty(), 3 < 4)'") for one in texts)
