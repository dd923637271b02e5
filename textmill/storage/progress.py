"""How far a long piece of work is: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

EVERY = 10.0
"""Seconds between two plain lines."""


class Bar(Protocol):
    """What the work tells of itself."""

    def advance(self, amount: float = 1, also: float = 0) -> None:
        """This much more is done, and so much of what is also counted."""
        ...


@contextmanager
def progress(name: str, total: float | None = None, unit: str = "", also: str = "") -> Iterator[Bar]:
    """Show the progress of the work inside, on stderr; the unit 'bytes' is shown as MB, `also` is a second unit whose rate is shown."""
    if sys.stderr.isatty():
        with _rich_bar(name, total, unit, also) as bar:
            yield bar
        return
    lines = PlainLines(name, total, unit, sys.stderr, also)
    yield lines
    lines.end()


class PlainLines:
    """Progress as lines of text, at most one every EVERY seconds and one at the end."""

    def __init__(self, name: str, total: float | None, unit: str, stream: TextIO, also: str = "") -> None:
        self.name, self.total, self.unit, self.stream, self.also = name, total, unit, stream, also
        self.done = self.more = 0.0
        self.start = self.said = time.monotonic()

    def advance(self, amount: float = 1, also: float = 0) -> None:
        self.done += amount
        self.more += also
        now = time.monotonic()
        if now - self.said >= EVERY:
            self.said = now
            self._say(now - self.start, ended=False)

    def end(self) -> None:
        self._say(time.monotonic() - self.start, ended=True)

    def _say(self, seconds: float, *, ended: bool) -> None:
        rate = self.done / max(seconds, 1e-9)
        so_far = amount_of(self.done, self.unit)
        if ended:
            told = f"{so_far} in {span_of(seconds)}"
        elif self.total:
            left = span_of((self.total - self.done) / rate) if rate else "?"
            told = f"{so_far} of {amount_of(self.total, self.unit)} ({self.done / self.total:.0%}), {left} left"
        else:
            told = so_far
        rates = [amount_of(rate, self.unit)] + (
            [amount_of(self.more / max(seconds, 1e-9), self.also)] if self.also else []
        )
        print(f"{self.name}: {told}, {', '.join(f'{one}/s' for one in rates)}", file=self.stream, flush=True)


@contextmanager
def _rich_bar(name: str, total: float | None, unit: str, also: str) -> Iterator[Bar]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        ProgressColumn,
        Task,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class Amount(ProgressColumn):
        def render(self, task: Task) -> Text:
            # The average since the start: a guess from the last moments is nonsense for work that comes in few large pieces.
            elapsed = max(task.finished_time or task.elapsed or 0, 1e-3)
            told = f"{amount_of(task.completed, unit)}, {amount_of(task.completed / elapsed, unit)}/s"
            return Text(told + (f", {amount_of(task.fields['more'] / elapsed, also)}/s" if also else ""))

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), Amount())
    remaining = TimeRemainingColumn(elapsed_when_finished=True)
    with Progress(*columns, remaining, console=Console(stderr=True)) as shown:
        task = shown.add_task(name, total=total, more=0.0)
        more = 0.0

        class Handle:
            def advance(self, amount: float = 1, also: float = 0) -> None:
                nonlocal more
                more += also
                shown.update(task, advance=amount, more=more)

        yield Handle()


def amount_of(amount: float, unit: str) -> str:
    """A number with its unit, short enough to read in passing."""
    if unit == "bytes":
        return f"{amount / 1e6:,.1f} MB"
    return f"{amount:,.0f} {unit}".rstrip()


def span_of(seconds: float) -> str:
    """A stretch of time: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
