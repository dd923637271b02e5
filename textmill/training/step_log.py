"""The step log: reports each logged step with its throughput, and at the end names the best checkpoint."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from textmill.checkpoints.best import VALID_LOSS, BestRule, read_metric
from textmill.checkpoints.folders import BEST_LINK, list_checkpoints, read_best_values
from textmill.storage.files import format_path
from textmill.track.jsonl import METRICS_FILE
from textmill.training.run_length import RunLength

OVERFITTING_RATIO = 1.005
"""Overfitting is reported if the last valid loss is above the lowest one by this factor."""


class StepResult(Protocol):
    """What the log needs of the result of a training step."""

    @property
    def loss(self) -> float:
        """Waits until the device has computed it."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the loss can be read without waiting."""
        ...


Result = TypeVar("Result", bound=StepResult)


class StepLog(Generic[Result]):
    """Reports steps without waiting for the device.

    If a step's loss is not ready yet, the step is reported while the device computes the next one. Throughput counts
    finished steps only.
    """

    def __init__(self, run_length: RunLength, step: int, report: Callable[[int, Result, float], None]) -> None:
        self.run_length = run_length
        self.report = report
        self._last_time = time.perf_counter()
        self._last_step = step
        self._pending: tuple[int, Result] | None = None
        self.paused_seconds = 0.0
        """The time of other work so far."""

    def add(self, done: int, result: Result) -> None:
        """Report the step with number `done` now, or later if its loss is not ready."""
        self._pending = done, result
        if result.ready:
            self.flush()

    def flush(self) -> None:
        """Report the pending step, if there is one; waits for its loss."""
        if self._pending is None:
            return
        (done, result), self._pending = self._pending, None
        _ = result.loss  # waits until the step is finished, before the clock is read
        now = time.perf_counter()
        tokens = self.run_length.tokens_after(done) - self.run_length.tokens_after(self._last_step)
        tokens_per_second = tokens / max(1e-9, now - self._last_time)
        self._last_time = now
        self._last_step = done
        self.report(done, result, tokens_per_second)

    @contextmanager
    def paused(self, result: Result) -> Iterator[None]:
        """Exclude the work in this context, such as an evaluation, from the throughput; waits for the step first."""
        self.flush()
        _ = result.loss
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._last_time += seconds
        self.paused_seconds += seconds


def describe_best(run: Path) -> str:
    """Describe the best checkpoint of a run; also report a better step that was not saved, and overfitting."""
    rule, values = read_best_values(run)
    best = rule.best_of(values)
    if best is None:
        return f"train: no checkpoint has a {rule.name}, so there is no best one"
    measured = values | _read_logged(run, rule.metric)
    best_measured = rule.best_of(measured)
    assert best_measured is not None
    folder = run / BEST_LINK if (run / BEST_LINK).exists() else list_checkpoints(run)[best]
    text = f"train: the best checkpoint is step {best:,}, {rule.describe(values[best])}: {format_path(folder)}"
    if rule.is_better(measured[best_measured], values[best]):
        interval = "train.evaluate_every" if rule.metric == VALID_LOSS else "the interval at which it is measured"
        text += f"; step {best_measured:,} had {measured[best_measured]:.4f} but was not saved: "
        text += f"set train.save_every to a divisor of {interval}"
    return text + _describe_overfitting(run)


def _describe_overfitting(run: Path) -> str:
    losses = read_metric(list_checkpoints(run), VALID_LOSS) | _read_logged(run, VALID_LOSS)
    lowest = BestRule().best_of(losses)
    if lowest is None or (last := losses[max(losses)]) <= OVERFITTING_RATIO * losses[lowest]:
        return ""
    return (
        f"; overfitting: valid loss rose from {losses[lowest]:.4f} to {last:.4f} since step {lowest:,}; "
        "use more text, fewer steps or a higher train.weight_decay"
    )


def _read_logged(run: Path, metric: str) -> dict[int, float]:
    """The finite values of a metric in metrics.jsonl, by step."""
    path = run / METRICS_FILE
    values = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        entry = json.loads(line)
        if entry.get(metric) is not None and math.isfinite(entry[metric]):
            values[entry["step"]] = entry[metric]
    return values
