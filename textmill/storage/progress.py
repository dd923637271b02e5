"""Progress of long work on stderr: a line that is replaced on a terminal or in a notebook, else a line every few
seconds."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

LINE_SECONDS = 10.0
"""Seconds between two plain lines."""
LIVE_SECONDS = 0.2
"""Seconds between two updates of a line that is replaced."""
BAR_WIDTH = 20


@contextmanager
def progress(
    name: str, total: float | None = None, unit: str = "", second_unit: str = "", is_short: bool = False
) -> Iterator[Bar]:
    """Show the progress of the work inside; 'bytes' is shown as MB, of `second_unit` only the rate is shown.

    `is_short`: work that is usually done at once, so that nothing of it stays on the screen unless it takes long.
    """
    bar = Bar(name, total, unit, sys.stderr, second_unit)
    if bar.is_live:
        replace_line(sys.stderr, f"{name} ...")
    try:
        yield bar
    finally:
        if bar.is_live:
            replace_line(sys.stderr, "")
    if not is_short or time.monotonic() - bar.start >= LINE_SECONDS:
        bar.end()


def can_replace_lines(stream: TextIO) -> bool:
    """Whether a carriage return goes back to the start of the line: on terminals, and in the cells of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel") or (stream.isatty() and os.environ.get("TERM") != "dumb")


def replace_line(stream: TextIO, text: str) -> None:
    """Write a text over the current line, and go back to its start."""
    width = shutil.get_terminal_size((120, 24)).columns - 1
    stream.write(f"\r{text[:width]:<{width}}\r")
    stream.flush()


def draw_bar(done: float, total: float | None) -> str:
    """A bar of the part that is done, and a space; nothing if the total is not known."""
    if not total:
        return ""
    filled = round(BAR_WIDTH * min(1.0, done / total))
    return "━" * filled + "╌" * (BAR_WIDTH - filled) + " "


class Bar:
    """Progress as a line that is replaced, or as lines, at most one every LINE_SECONDS and one at the end."""

    def __init__(self, name: str, total: float | None, unit: str, stream: TextIO, second_unit: str = "") -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.stream = stream
        self.second_unit = second_unit
        self.is_live = can_replace_lines(stream)
        self.done = self.second_done = 0.0
        self.start = self.last_line = time.monotonic()

    def advance(self, amount: float = 1, second_amount: float = 0) -> None:
        """Add to the work done, and to the amount in the second unit."""
        self.done += amount
        self.second_done += second_amount
        now = time.monotonic()
        if now - self.last_line < (LIVE_SECONDS if self.is_live else LINE_SECONDS):
            return
        self.last_line = now
        rate = self.done / max(now - self.start, 1e-9)
        text = format_amount(self.done, self.unit)
        if self.total:
            left = format_duration((self.total - self.done) / rate) if rate else "?"
            text = f"{text} of {format_amount(self.total, self.unit)} ({self.done / self.total:.0%}), {left} left"
        text = f"{text}, {self._format_rates(now - self.start)}"
        if self.is_live:
            replace_line(self.stream, f"{self.name}: {draw_bar(self.done, self.total)}{text}")
        else:
            self._print(text)

    def end(self) -> None:
        """Print the last line."""
        seconds = time.monotonic() - self.start
        amount = format_amount(self.done, self.unit)
        self._print(f"{amount} in {format_duration(seconds)}, {self._format_rates(seconds)}")

    def _format_rates(self, seconds: float) -> str:
        amounts = [(self.done, self.unit)] + [(self.second_done, self.second_unit)] * bool(self.second_unit)
        return ", ".join(f"{format_amount(amount / max(seconds, 1e-9), unit)}/s" for amount, unit in amounts)

    def _print(self, text: str) -> None:
        print(f"{self.name}: {text}", file=self.stream, flush=True)


def format_amount(amount: float, unit: str) -> str:
    """A rounded number with its unit: 1.5 MB, 12,345 documents."""
    if unit == "bytes":
        return f"{amount / 1e6:,.1f} MB"
    return f"{amount:,.0f} {unit}".rstrip()


def format_duration(seconds: float) -> str:
    """A duration: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"
