"""Progress of long work: a bar on a terminal (stderr) or in a notebook, a plain line every few seconds elsewhere."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Protocol, TextIO

LINE_SECONDS = 10.0
"""Seconds between two plain lines."""
NOTEBOOK_SECONDS = 0.5
"""Seconds between two updates of a bar in a notebook."""


class Bar(Protocol):
    """What the work calls as it advances."""

    def advance(self, amount: float = 1, second_amount: float = 0) -> None:
        """Add to the work done, and to the amount in the second unit."""
        ...


@contextmanager
def progress(
    name: str, total: float | None = None, unit: str = "", second_unit: str = "", is_short: bool = False
) -> Iterator[Bar]:
    """Show the progress of the work inside; 'bytes' is shown as MB, of `second_unit` only the rate is shown.

    `is_short`: work that is usually done at once, so that nothing of it stays on the screen unless it takes long.
    """
    if sys.stderr.isatty():
        with _rich_bar(name, total, unit, second_unit, is_short) as bar:
            yield bar
        return
    cell = notebook_cell()
    lines = (
        NotebookLines(name, total, unit, cell, second_unit)
        if cell
        else PlainLines(name, total, unit, sys.stderr, second_unit)
    )
    yield lines
    if not is_short or lines.last_line > lines.start:
        lines.end()


def notebook_cell() -> Callable[[str], None] | None:
    """In a Jupyter notebook, a function that shows HTML below the cell in place of what it showed before."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not hasattr(shell, "kernel"):
        return None
    ipython = import_module("IPython.display")
    handle = ipython.display(ipython.HTML(""), display_id=True)
    return lambda text: handle.update(ipython.HTML(text))


def html_bar(done: float, total: float | None, text: str) -> str:
    """A progress bar, for `notebook_cell`, and text next to it."""
    bar = f'<progress value="{done:.10g}" max="{total:.10g}"></progress> ' if total else ""
    return f'<div style="font-family: monospace">{bar}{html.escape(text)}</div>'


class PlainLines:
    """Progress as lines of text, at most one every `between` seconds and one at the end."""

    between = LINE_SECONDS

    def __init__(self, name: str, total: float | None, unit: str, stream: TextIO, second_unit: str = "") -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.stream = stream
        self.second_unit = second_unit
        self.done = self.second_done = 0.0
        self.start = self.last_line = time.monotonic()

    def advance(self, amount: float = 1, second_amount: float = 0) -> None:
        self.done += amount
        self.second_done += second_amount
        now = time.monotonic()
        if now - self.last_line >= self.between:
            self.last_line = now
            self._print(now - self.start, ended=False)

    def end(self) -> None:
        self._print(time.monotonic() - self.start, ended=True)

    def _print(self, seconds: float, *, ended: bool) -> None:
        rate = self.done / max(seconds, 1e-9)
        text = format_amount(self.done, self.unit)
        if ended:
            text = f"{text} in {format_duration(seconds)}"
        elif self.total:
            left = format_duration((self.total - self.done) / rate) if rate else "?"
            text = f"{text} of {format_amount(self.total, self.unit)} ({self.done / self.total:.0%}), {left} left"
        rates = [format_amount(rate, self.unit)]
        if self.second_unit:
            rates.append(format_amount(self.second_done / max(seconds, 1e-9), self.second_unit))
        self._show(f"{self.name}: {text}, {', '.join(f'{one}/s' for one in rates)}")

    def _show(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class NotebookLines(PlainLines):
    """Progress as a bar in a notebook."""

    between = NOTEBOOK_SECONDS

    def __init__(
        self, name: str, total: float | None, unit: str, cell: Callable[[str], None], second_unit: str = ""
    ) -> None:
        super().__init__(name, total, unit, sys.stderr, second_unit)
        self.cell = cell

    def _show(self, text: str) -> None:
        self.cell(html_bar(self.done, self.total, text))


@contextmanager
def _rich_bar(name: str, total: float | None, unit: str, second_unit: str, transient: bool) -> Iterator[Bar]:
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

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            # The average since the start: a recent rate is misleading for work that advances in few large chunks.
            elapsed = max(task.finished_time or task.elapsed or 0, 1e-3)
            text = f"{format_amount(task.completed, unit)}, {format_amount(task.completed / elapsed, unit)}/s"
            if second_unit:
                text += f", {format_amount(task.fields['second_done'] / elapsed, second_unit)}/s"
            return Text(text)

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), RateColumn())
    remaining = TimeRemainingColumn(elapsed_when_finished=True)
    with Progress(*columns, remaining, console=Console(stderr=True), transient=transient) as display:
        task = display.add_task(name, total=total, second_done=0.0)
        second_done = 0.0

        class RichBar:
            def advance(self, amount: float = 1, second_amount: float = 0) -> None:
                nonlocal second_done
                second_done += second_amount
                display.update(task, advance=amount, second_done=second_done)

        yield RichBar()


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
