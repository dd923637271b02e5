"""The log of a run: a step is told of when its numbers have come, with the rate since the one before; the end names the best."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from textmill.checkpoints.folders import BEST_LINK, list_checkpoints, read_valid_losses
from textmill.storage.files import format_path
from textmill.track.jsonl import METRICS_FILE
from textmill.training.run_length import RunLength

OVERFITTING_RATIO = 1.005
"""How far above its lowest a valid loss at the end is worth a word: by its share, half a hundredth."""


class Step(Protocol):
    """A step's result, as far as it is asked here."""

    @property
    def loss(self) -> float: ...
    @property
    def ready(self) -> bool: ...


Result = TypeVar("Result", bound=Step)


class StepLog(Generic[Result]):
    """Tells of a step while the device is at work on the next one, if it still was on this one; a rate is of work that is done."""

    def __init__(self, course: RunLength, step: int, tell: Callable[[int, Result, float], None]) -> None:
        self.course, self.tell = course, tell
        self._clock, self._clocked = time.perf_counter(), step
        self._late: tuple[int, Result] | None = None

    def enter(self, done: int, result: Result) -> None:
        """Tell of the step, or put it off until its numbers have come."""
        self._late = done, result
        if result.ready:
            self.write()

    def write(self) -> None:
        """Tell of the step that was put off, if there is one; waits for it."""
        if self._late is None:
            return
        (done, result), self._late = self._late, None
        _ = result.loss  # read before the clock: it comes when the step is done
        now, samples = time.perf_counter(), self.course.samples(done) - self.course.samples(self._clocked)
        rate = samples * self.course.length / max(1e-9, now - self._clock)
        self._clock, self._clocked = now, done
        self.tell(done, result, rate)

    @contextmanager
    def paused(self, result: Result) -> Iterator[None]:
        """Other work after a step, once that is done and told of; its time counts for no step."""
        self.write()
        _ = result.loss
        began = time.perf_counter()
        yield
        self._clock += time.perf_counter() - began


def describe_best(run: Path) -> str:
    """Which checkpoint is best, for the end of a run; whether a lower loss was seen where none was saved, and whether it rose again."""
    losses = read_valid_losses(run)
    if not losses:
        return "train: no checkpoint has a valid loss, so none is best"
    best = min(losses, key=losses.__getitem__)
    lines = (run / METRICS_FILE).read_text(encoding="utf-8").splitlines() if (run / METRICS_FILE).is_file() else []
    seen = losses | {line["step"]: line["valid_loss"] for line in map(json.loads, lines) if "valid_loss" in line}
    lowest, place = (
        min(seen, key=seen.__getitem__),
        run / BEST_LINK if (run / BEST_LINK).exists() else list_checkpoints(run)[best],
    )
    told = f"train: the best checkpoint is step {best:,}, valid loss {losses[best]:.4f}: {format_path(place)}"
    if seen[lowest] < losses[best]:
        told += f"; step {lowest:,} had {seen[lowest]:.4f} and was not saved: let train.save_every divide train.evaluate_every"
    if (last := seen[max(seen)]) > OVERFITTING_RATIO * seen[lowest]:
        told += f"; it has risen to {last:.4f} since: the text is being learnt by heart, against which there are more text, fewer steps "
        told += "and a higher train.weight_decay"
    return told
