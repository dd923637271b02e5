"""Training progress on the console: a live line on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

from textmill.storage.progress import LIVE_SECONDS, can_replace_lines, draw_bar, replace_line

Values = dict[str, float]


@dataclass
class Throughput:
    """Computes throughput and remaining time from the steps done."""

    steps: int | None
    """Steps of the run; None while they are not known."""
    start: int
    tokens: Callable[[int], int]
    """Tokens of the first N steps; the batch size may grow during a run."""
    flops_per_token: float
    peak_flops: float | None
    """Of all devices together; None if the chip is unknown."""
    clock: Callable[[], float] = time.monotonic
    start_time: float = field(default_factory=time.monotonic)
    first_logged: tuple[int, float] | None = None
    """The first logged step of this process and its time; the time before it includes compilation."""

    def seconds_left(self, step: int) -> float | None:
        """Estimated from all tokens since the first logged step; includes evaluation and saving, but not the start."""
        first, since = self.first_logged or (self.start, self.start_time)
        if step <= first or self.steps is None:
            return None
        return (
            (self.clock() - since)
            / (self.tokens(step) - self.tokens(first))
            * (self.tokens(self.steps) - self.tokens(step))
        )

    def _done(self, step: int) -> int:
        """Tokens since this process started."""
        return self.tokens(step) - self.tokens(self.start)

    def speed(self, step: int, values: Values) -> float | None:
        """Tokens per second: the logged value, else the average since the start."""
        elapsed = self.clock() - self.start_time
        average = self._done(step) / elapsed if step > self.start and elapsed > 0 else None
        return values.get("tokens_per_second", average)

    def format_step(self, step: int) -> str:
        """' 120/1000', with the same width at every step; '120/?' while the number of steps is not known."""
        if self.steps is None:
            return f"{step}/?"
        return f"{step:>{len(str(self.steps))}}/{self.steps}"

    def format_values(self, step: int, values: Values) -> list[str]:
        """Loss and its terms, bits per byte, perplexity, epoch, learning rate, throughput, MFU and time left."""
        texts = []
        if "loss" in values:
            bits = f" ({values['bits_per_byte']:.3f} bits/byte)" if "bits_per_byte" in values else ""
            texts.append(f"loss {values['loss']:.4f}{bits}")
        if "perplexity" in values:
            texts.append(f"ppl {values['perplexity']:.2f}")
        for name in values:
            if name == "pair_loss" or name.startswith("distil_"):
                texts.append(f"{name.removeprefix('distil_').replace('_', ' ')} {values[name]:.4f}")
        if "epoch" in values:
            texts.append(f"epoch {values['epoch']:.2f}")
        if "learning_rate" in values:
            texts.append(f"lr {values['learning_rate']:.1e}")
        if (speed := self.speed(step, values)) is not None:
            texts.append(f"{speed:,.0f} tok/s")
            if self.peak_flops:
                texts.append(f"MFU {100 * speed * self.flops_per_token / self.peak_flops:.1f}%")
        if (left := self.seconds_left(step)) is not None:
            texts.append(f"left {format_time(left)}{'' if self.first_logged else ' at most'}")
        self.first_logged = self.first_logged or (step, self.clock())
        return texts


class PlainConsole:
    """One line per logged step, for files, pipes and job logs."""

    def __init__(self, throughput: Throughput, stream: TextIO) -> None:
        self.throughput = throughput
        self._stream = stream

    def log(self, step: int, values: Values) -> None:
        """Print one line; a valid loss gets a line of its own."""
        where = f"step  {self.throughput.format_step(step)}"
        rest = dict(values)
        valid = rest.pop("valid_loss", None)
        for line in (tasks := format_tasks(values)):
            self._print(f"{where}  {line}")
        if "loss" in rest or (valid is None and not tasks):
            self._print("  ".join([where, *self.throughput.format_values(step, rest)]))
        if valid is not None:
            self._print(f"{where}  {format_valid(values)}")

    def mark(self, step: int, text: str) -> None:
        """Changed settings were printed when the run resumed."""

    def advance(self, step: int) -> None:
        """Steps that are not logged get no line."""

    def note(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        """Nothing to close."""

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class LiveConsole(PlainConsole):
    """A line that is replaced as training goes on: the last loss, the last valid loss, and what else was logged."""

    def __init__(self, throughput: Throughput, stream: TextIO) -> None:
        super().__init__(throughput, stream)
        self._valid: float | None = None
        self._texts: list[str] = []
        self._step = throughput.start
        self._shown = -math.inf

    def log(self, step: int, values: Values) -> None:
        """Update the line; it keeps showing the last loss and the last valid loss."""
        if "valid_loss" in values:
            self._valid = values["valid_loss"]
            self.note(f"step {step}: {format_valid(values)}")
        for line in format_tasks(values):
            self.note(f"step {step}: {line}")
        if "loss" in values:
            self._texts = self.throughput.format_values(step, values)
        self._shown = -math.inf
        self.advance(step)

    def advance(self, step: int) -> None:
        """Show how many steps are done."""
        self._step = step
        if (now := self.throughput.clock()) - self._shown >= LIVE_SECONDS:
            self._shown = now
            replace_line(self._stream, self._line())

    def note(self, text: str) -> None:
        """Print a line above the live one."""
        replace_line(self._stream, "")
        self._print(text)

    def close(self) -> None:
        """The last line stays visible."""
        self.note(self._line())

    def _line(self) -> str:
        place = f"step {self.throughput.format_step(self._step)}"
        valid = [] if self._valid is None else [f"valid {self._valid:.4f}"]
        bar = draw_bar(self._step, self.throughput.steps)
        return "  ".join([f"{place} {bar}".rstrip(), *self._texts[:1], *valid, *self._texts[1:]])


def new_console(throughput: Throughput, stream: TextIO) -> PlainConsole:
    """A live line where lines can be replaced, else plain lines."""
    return (LiveConsole if can_replace_lines(stream) else PlainConsole)(throughput, stream)


OF_SOURCE = "valid_loss_"
"""Begins the name of the valid loss of a named source."""


def format_valid(values: Values) -> str:
    """The loss on the valid split, in bits per byte too, its perplexity, and the fraction of its tokens predicted
    correctly, next to that of the last train batch."""
    train = f" (train {values['train_accuracy']:.1%})" if "train_accuracy" in values else ""
    accuracy = f"  accuracy {values['valid_accuracy']:.1%}{train}" if "valid_accuracy" in values else ""
    perplexity = f"  ppl {values['valid_perplexity']:.2f}" if "valid_perplexity" in values else ""
    bits = f"  {values['valid_bits_per_byte']:.3f} bits/byte" if "valid_bits_per_byte" in values else ""
    by_source = ", ".join(
        f"{name.removeprefix(OF_SOURCE)} {value:.4f}" for name, value in values.items() if name.startswith(OF_SOURCE)
    )
    sources = f" ({by_source})" if by_source else ""
    return f"valid loss {values['valid_loss']:.4f}{sources}{bits}{perplexity}{accuracy}"


def format_tasks(values: Values) -> list[str]:
    """A line for each task that was measured: its metrics and its seconds."""
    tasks: dict[str, list[str]] = {}
    for name, value in values.items():
        task, slash, metric = name.partition("/")
        if slash:
            tasks.setdefault(task, []).append(f"{value:.1f} s" if metric == "seconds" else f"{metric} {value:.4g}")
    return [f"{task}: {', '.join(texts)}" for task, texts in tasks.items()]


def format_time(seconds: float) -> str:
    """3:20, or 1:02:05 from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
