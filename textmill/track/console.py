"""Training on the console: a live line on a terminal, plain lines everywhere else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TextIO

Values = dict[str, float]


class Console(Protocol):
    """A tracker that also prints notes."""

    def log(self, step: int, values: Values) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


@dataclass
class Pace:
    """What turns a step's numbers into speed and time left."""

    steps: int
    start: int
    tokens: Callable[[int], int]
    """Tokens of the run's first so many steps; a batch may grow."""
    flops_per_token: float
    peak_flops: float | None
    """Of all devices together; None where the chip is not known."""
    clock: Callable[[], float] = time.monotonic
    began: float = field(default_factory=time.monotonic)
    told: tuple[int, float] | None = None
    """The first step of this process that was told of, and when: what came before it was compiling too."""

    def seconds_left(self, step: int) -> float | None:
        """From the wall time of the tokens since the first step told of: evaluation and saving are counted in, starting is not."""
        first, since = self.told or (self.start, self.began)
        if step <= first:
            return None
        return (
            (self.clock() - since)
            / (self.tokens(step) - self.tokens(first))
            * (self.tokens(self.steps) - self.tokens(step))
        )

    def _done(self, step: int) -> int:
        """Tokens since this process began."""
        return self.tokens(step) - self.tokens(self.start)

    def speed(self, step: int, values: Values) -> float | None:
        """Tokens a second: the loop's own figure, else the average since the start."""
        passed = self.clock() - self.began
        average = self._done(step) / passed if step > self.start and passed > 0 else None
        return values.get("tokens_per_second", average)

    def place(self, step: int) -> str:
        """'  120/1000', as wide at every step."""
        return f"{step:>{len(str(self.steps))}}/{self.steps}"

    def words(self, step: int, values: Values) -> list[str]:
        """Loss, learning rate, speed and time left, each as a person reads it."""
        words = []
        if "loss" in values:
            words.append(f"loss {values['loss']:.4f}")
        if "learning_rate" in values:
            words.append(f"lr {values['learning_rate']:.1e}")
        if (speed := self.speed(step, values)) is not None:
            words.append(f"{speed:,.0f} tok/s")
            if self.peak_flops:
                words.append(f"MFU {100 * speed * self.flops_per_token / self.peak_flops:.1f}%")
        if (left := self.seconds_left(step)) is not None:
            words.append(f"left {format_time(left)}{'' if self.told else ' at most'}")
        self.told = self.told or (step, self.clock())
        return words


class PlainConsole:
    """A line a log, for files, pipes and job logs."""

    def __init__(self, pace: Pace, stream: TextIO) -> None:
        self._pace, self._stream = pace, stream

    def log(self, step: int, values: Values) -> None:
        """One line; a valid loss has a line of its own."""
        where = f"step  {self._pace.place(step)}"
        rest = dict(values)
        valid = rest.pop("valid_loss", None)
        if "loss" in rest or valid is None:
            self._print("  ".join([where, *self._pace.words(step, rest)]))
        if valid is not None:
            self._print(f"{where}  {format_valid(values)}")

    def note(self, text: str) -> None:
        """A line of its own."""
        self._print(text)

    def close(self) -> None:
        """Nothing is held."""

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class LiveConsole:
    """One line that stays at the bottom of a terminal."""

    def __init__(self, pace: Pace, stream: TextIO) -> None:
        # Loading rich takes longer than a first line in a job log should wait.
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, Progress, TextColumn

        self._pace = pace
        self._valid: float | None = None
        columns = (
            TextColumn("step {task.fields[place]}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}", markup=False),
        )
        self._bar = Progress(*columns, console=Terminal(file=stream, highlight=False), refresh_per_second=4)
        self._task = self._bar.add_task("", total=pace.steps, completed=pace.start, place=pace.place(pace.start))
        self._bar.start()

    def log(self, step: int, values: Values) -> None:
        """Renew the line; the last valid loss stays in it."""
        if "valid_loss" in values:
            self._valid = values["valid_loss"]
            self.note(f"step {step}: {format_valid(values)}")
        if "loss" not in values:
            return
        words = self._pace.words(step, values)
        if self._valid is not None:
            words.insert(1, f"valid {self._valid:.4f}")
        self._bar.update(self._task, completed=step, place=self._pace.place(step), description="  ".join(words))

    def note(self, text: str) -> None:
        """A line above the live one."""
        self._bar.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last state of the line standing."""
        self._bar.stop()


def new_console(pace: Pace, stream: TextIO) -> Console:
    """The console that fits the stream."""
    live = stream.isatty() and os.environ.get("TERM") != "dumb"
    return LiveConsole(pace, stream) if live else PlainConsole(pace, stream)


def format_valid(values: Values) -> str:
    """The loss on the valid split, and beside it the share of its tokens that were guessed right."""
    right = f"  accuracy {values['valid_accuracy']:.1%}" if "valid_accuracy" in values else ""
    return f"valid loss {values['valid_loss']:.4f}{right}"


def format_time(seconds: float) -> str:
    """3:20, or 1:02:05 from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
