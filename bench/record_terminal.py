"""Record commands on a terminal and draw the recording as an animated SVG.

    python bench/record_terminal.py SVG [in=FOLDER] [cast=FILE] [columns=100] [rows=24] [seconds=30] COMMAND...

Each command runs in FOLDER on a pseudo-terminal of its own, with everything that it writes and when. Pauses of more
than PAUSE seconds are shortened to that, and what is then longer than `seconds` is shown faster; nothing else is
changed. `cast` keeps the recording in asciinema's format, from which `SVG cast=FILE` without commands draws it again.
"""

from __future__ import annotations

import codecs
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

PAUSE, TYPING, FRAME, LAST = 0.7, 0.04, 0.15, 5.0
"""Seconds: the longest pause, a typed letter, the shortest time that a state of the screen is shown, the last one."""
WIDTH, HEIGHT, EDGE = 7.9, 17, 14
"""Pixels: a letter, a line, the border."""
COLORS = ("#8a8f98", "#e5707a", "#7fc67f", "#d8b86a", "#6fa8dc", "#c08fd8", "#62c1c1", "#d8dce2")
BACKGROUND, FOREGROUND = "#15181d", "#d8dce2"
CONTROL = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[=>78]|\x1b\][^\x07]*\x07")

Event = tuple[float, str]
"""Seconds since the start, and what was written."""
Cell = tuple[str, str]
"""A letter and its color."""


@dataclass
class Screen:
    """The lines that a terminal shows, without an end: a line keeps its number when it scrolls away."""

    columns: int
    lines: list[list[Cell]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    color: str = ""

    def write(self, text: str) -> None:
        """Take letters and control sequences as a terminal does."""
        place = 0
        while place < len(text):
            if found := CONTROL.match(text, place):
                self._control(found[1] or "", found[2] or "")
                place = found.end()
                continue
            letter, place = text[place], place + 1
            if letter == "\n":
                self._move(self.row + 1, self.column)
            elif letter == "\r":
                self.column = 0
            elif letter == "\b":
                self.column = max(0, self.column - 1)
            elif letter >= " ":
                if self.column == self.columns:
                    self._move(self.row + 1, 0)
                line = self.lines[self.row]
                line.extend([(" ", "")] * (self.column + 1 - len(line)))
                line[self.column] = (letter, self.color)
                self.column += 1

    def _move(self, row: int, column: int) -> None:
        self.row, self.column = max(0, row), max(0, column)
        while len(self.lines) <= self.row:
            self.lines.append([])

    def _control(self, numbers: str, kind: str) -> None:
        values = [int(one) for one in numbers.split(";") if one.isdigit()]
        count = (values or [1])[0] or 1
        if kind in "ABCD":
            down, right = {"A": (-1, 0), "B": (1, 0), "C": (0, 1), "D": (0, -1)}[kind]
            self._move(self.row + down * count, self.column + right * count)
        elif kind == "K":
            del self.lines[self.row][0 if values == [2] else self.column :]
        elif kind == "m":
            for value in values or [0]:
                if 30 <= value % 60 <= 37:
                    self.color = COLORS[value % 60 - 30]
                elif value in (0, 39):
                    self.color = ""

    def shown(self) -> list[tuple[Cell, ...]]:
        """The lines up to the last one with a letter."""
        lines = [tuple(line) for line in self.lines]
        while lines and not "".join(letter for letter, _ in lines[-1]).strip():
            lines.pop()
        return lines


def record(command: str, folder: Path, columns: int, rows: int) -> list[Event]:
    """Run a command on a pseudo-terminal; the first events are its own letters."""
    events, clock = [(TYPING * number, letter) for number, letter in enumerate(f"$ {command}\r\n")], time.monotonic()
    offset = events[-1][0]
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "LINES": str(rows)}
    process = subprocess.Popen(
        ["sh", "-c", command], cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := _read(master):
        events.append((offset + time.monotonic() - clock, decoder.decode(data)))
    if process.wait():
        sys.exit(f"{command}: exit code {process.returncode}")
    return events


def _read(master: int) -> bytes:
    try:
        return os.read(master, 65536)
    except OSError:  # the terminal of a process that has ended
        return b""


def join(recordings: list[list[Event]]) -> list[Event]:
    """The recordings one after the other, without long pauses."""
    found: list[Event] = []
    now = 0.0
    for events in recordings:
        before = -PAUSE
        for when, text in events:
            now += min(when - before, PAUSE)
            before = when
            found.append((now, text))
    return found


def shorten(events: list[Event], seconds: float) -> list[Event]:
    """The same events in at most so many seconds."""
    faster = max(1.0, events[-1][0] / seconds)
    return [(when / faster, text) for when, text in events]


def draw(events: list[Event], columns: int, rows: int) -> str:
    """An animated SVG: each state of each line is shown from one time to another, and the lines move up."""
    screen, until, drawn = Screen(columns), events[-1][0] + LAST, 0.0
    open_lines: dict[int, tuple[float, tuple[Cell, ...]]] = {}
    parts: list[str] = []
    moves: list[tuple[float, int]] = [(0.0, 0)]
    for number, (when, text) in enumerate(events):
        screen.write(text)
        if number + 1 < len(events) and events[number + 1][0] - drawn < FRAME:
            continue
        drawn, lines = when, screen.shown()
        for place in range(max(len(lines), len(open_lines))):
            line = lines[place] if place < len(lines) else ()
            start, before = open_lines.get(place, (when, ()))
            if line != before:
                parts += draw_line(before, place, start, when, until)
                open_lines[place] = (when, line)
        if (top := max(0, len(lines) - rows)) != moves[-1][1]:
            moves.append((when, top))
    for place, (start, line) in open_lines.items():
        parts += draw_line(line, place, start, until, until)
    values, times = (
        ";".join(f"0 {-HEIGHT * top}" for _, top in moves),
        ";".join(f"{when / until:.5f}" for when, _ in moves),
    )
    width, height = columns * WIDTH + 2 * EDGE, rows * HEIGHT + 2 * EDGE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="13" fill="{FOREGROUND}">\n'
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>\n'
        f'<svg x="{EDGE}" y="{EDGE}" width="{width - 2 * EDGE:.0f}" height="{rows * HEIGHT}">'
        f'<g transform="translate(0 {-HEIGHT * moves[-1][1]})">\n'
        f'<animateTransform attributeName="transform" type="translate" calcMode="discrete" values="{values}" '
        f'keyTimes="{times}" dur="{until:.2f}s" repeatCount="indefinite"/>\n'
        + "\n".join(parts)
        + "\n</g></svg></svg>\n"
    )


def draw_line(line: tuple[Cell, ...], place: int, start: float, end: float, until: float) -> list[str]:
    """One state of a line, visible from `start` to `end` of a recording of `until` seconds."""
    if not "".join(letter for letter, _ in line).strip():
        return []
    spans, color, run = [], line[0][1], ""
    for letter, own in (*line, ("", None)):
        if own != color:
            spans.append(f'<tspan fill="{color}">{escape(run)}</tspan>' if color else escape(run))
            color, run = str(own), ""
        run += letter.replace(" ", "\u00a0")  # else several would be drawn as one
    states = ("hidden;visible", f"0;{start / until:.5f}")
    if end < until:
        states = ("hidden;visible;hidden", f"0;{start / until:.5f};{end / until:.5f}")
    return [
        f'<text y="{HEIGHT * place + 13}" visibility="{"hidden" if end < until else "visible"}">{"".join(spans)}'
        f'<animate attributeName="visibility" calcMode="discrete" values="{states[0]}" keyTimes="{states[1]}" '
        f'dur="{until:.2f}s" repeatCount="indefinite"/></text>'
    ]


def main() -> None:
    """Record all commands and draw them."""
    svg, *words = sys.argv[1:]
    options = {"in": ".", "columns": "100", "rows": "24", "seconds": "30"}
    while words and re.match(r"(in|cast|columns|rows|seconds)=", words[0]):
        key, _, value = words.pop(0).partition("=")
        options[key] = value
    columns, rows = int(options["columns"]), int(options["rows"])
    recordings = [record(command, Path(options["in"]), columns, rows) for command in words]
    for command, events in zip(words, recordings, strict=True):
        print(f"{events[-1][0]:7.1f} s  {command}")
    events = join(recordings)
    if "cast" in options and not words:
        lines = Path(options["cast"]).read_text(encoding="utf-8").splitlines()[1:]
        events = [(when, text) for when, _, text in map(json.loads, lines)]
    elif "cast" in options:
        lines = [json.dumps({"version": 2, "width": columns, "height": rows})]
        lines += [json.dumps([round(when, 3), "o", text]) for when, text in events]
        Path(options["cast"]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    Path(svg).write_text(draw(shorten(events, float(options["seconds"])), columns, rows), encoding="utf-8")


if __name__ == "__main__":
    main()
