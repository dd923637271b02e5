"""The time of steps: the throughput in the log, and how many steps fit in `train.minutes`.

With `train.minutes`, step 1 compiles and is not timed. After step 4 there is a first estimate of the number of steps.
Whenever a fiftieth of the remaining steps is done, they are timed and the estimate is corrected, until the run ends:
what slows a part of the run costs the time of that part. The learning rate has no jump then (`RunLength`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from textmill.engines import Step
from textmill.errors import warn
from textmill.processes.ranks import Ranks, run_on_all
from textmill.storage.progress import format_duration
from textmill.training.run_length import RunLength

FIRST_STEPS = 3
"""Timed steps before the first estimate."""
FIRST_FRACTION = 0.1
"""Or fewer, if they take this fraction of the time."""
TIMED_FRACTION = 0.02
"""The fraction of the remaining steps that is timed before the next estimate: even if they suddenly take 20 times as
long, more than half of the remaining time is left."""
PRINTED_CHANGE = 0.2
"""A number of steps that changes by more than this fraction is printed."""
END_SECONDS = 5.0
"""What a command that evaluates and generates after training needs besides a pass over the valid split."""
MIN_FRACTION = 0.2
"""Steps get at least this fraction of the minutes, even if the start took so long that the command ends later."""


class StepLog:
    """Reports steps without waiting for the device.

    If a step's loss is not ready yet, the step is reported while the device computes the next one. Throughput counts
    finished steps only.
    """

    def __init__(self, run_length: RunLength, step: int, report: Callable[[int, Step, float], None]) -> None:
        self.run_length = run_length
        self.report = report
        self._last_time = time.perf_counter()
        self._last_step = step
        self._pending: tuple[int, Step] | None = None
        self.paused_seconds = 0.0
        """The time of other work so far."""

    def add(self, done: int, result: Step) -> None:
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
    def paused(self, result: Step) -> Iterator[None]:
        """Exclude the work in this context, such as an evaluation, from the throughput; waits for the step first."""
        self.flush()
        _ = result.loss
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._last_time += seconds
        self.paused_seconds += seconds


@dataclass(frozen=True)
class Costs:
    """Seconds of one evaluation, of one save, of a pass over the entire valid split, and of `train.tasks`."""

    evaluation: float
    save: float
    full_pass: float
    tasks: float = 0.0

    def scaled(self, factor: float) -> Costs:
        """The costs when the device computes so many times more slowly."""
        return Costs(factor * self.evaluation, self.save, factor * self.full_pass, factor * self.tasks)


class MinutesTimer:
    """Estimates the number of steps. Rank 0's clock decides; all ranks call `after_step` together and get the same
    length."""

    def __init__(
        self,
        started: float,
        evaluates: bool,
        first: int | None,
        ranks: Ranks,
        log: StepLog,
        measure_costs: Callable[[], Costs],
    ) -> None:
        """`started` is when the command started, by `time.perf_counter`; `evaluates`: it evaluates after training.

        `first` is the first step of this process, which is not timed: it includes compilation. None: a resumed run
        keeps the number of steps that it had.
        """
        self.started = started
        self.evaluates = evaluates
        self.first = first or 0
        self.ranks = ranks
        self.log = log
        self.measure_costs = measure_costs
        self._next_step = self.first
        """The step after which the length is estimated next."""
        self._timed_from = (self.first, 0.0)
        """The step after which timing began, and when that was."""
        self._token_seconds = 0.0
        """Of a token, as of the latest estimate."""
        self._costs: Costs | None = None
        """Measured at the first estimate."""
        self._printed_steps = 0

    def after_step(self, length: RunLength, done: int, result: Step) -> RunLength:
        """The length of the run after `done` steps: another one after each estimate."""
        if done != self._next_step or (length.known and done == length.steps):
            return length
        _ = result.loss  # waits until the step is finished
        if done == self.first:
            self._timed_from = done, self._step_clock()
            self._warn_of_late_start(length)
        if not (length.known or self.ranks.all_gather(self._is_enough(length, done))[0]):
            self._next_step = done + 1
            return length
        seconds = self._measure_token_seconds(length, done)
        if self._costs is None:
            with self.log.paused(result):
                self._costs = self.measure_costs()
            self._first_token_seconds = self._token_seconds = seconds
            self._earliest_end = time.perf_counter() + self._least_seconds(length)
        self._token_seconds = (self._token_seconds + seconds) / 2
        costs = self._costs.scaled(self._token_seconds / self._first_token_seconds)
        end = max(self._end(length) - (costs.full_pass if self.evaluates else 0.0), self._earliest_end)
        steps = fitting_steps(length, done, end - time.perf_counter(), 1 / self._token_seconds, costs)
        steps = self.ranks.all_gather(steps)[0]
        self._next_step = done + max(1, round(TIMED_FRACTION * (steps - done)))
        self._timed_from = done, self._step_clock()
        return run_on_all(self.ranks, lambda: length.with_measured_steps(steps, done))

    def is_news(self, length: RunLength) -> bool:
        """Whether the number of steps differs much from the one of which this was true before."""
        if abs(length.steps - self._printed_steps) <= PRINTED_CHANGE * self._printed_steps:
            return False
        self._printed_steps = length.steps
        return True

    def _is_enough(self, length: RunLength, done: int) -> bool:
        """Whether enough steps are timed for the first estimate."""
        left = max(self._end(length) - time.perf_counter(), self._least_seconds(length))
        seconds_timed = self._step_clock() - self._timed_from[1]
        return done >= min(self.first + FIRST_STEPS, length.max_steps) or seconds_timed >= FIRST_FRACTION * left

    def _step_clock(self) -> float:
        """A clock that stands still during evaluations and saves."""
        return time.perf_counter() - self.log.paused_seconds

    def _measure_token_seconds(self, length: RunLength, done: int) -> float:
        step, start = self._timed_from
        tokens = length.tokens_after(done) - length.tokens_after(step)
        return max(1e-9, self._step_clock() - start) / max(1, tokens)

    def _end(self, length: RunLength) -> float:
        """When training must end; what follows it is subtracted, except a pass over the valid split."""
        assert length.train.minutes is not None
        return self.started + 60 * length.train.minutes - (END_SECONDS if self.evaluates else 0.0)

    def _least_seconds(self, length: RunLength) -> float:
        """What steps get even if the start took too long: a model of a few steps would be of no use."""
        assert length.train.minutes is not None
        return MIN_FRACTION * 60 * length.train.minutes

    def _warn_of_late_start(self, length: RunLength) -> None:
        """An error would leave the user without a model after all stages before."""
        if self.ranks.first and self._end(length) <= time.perf_counter():
            took = format_duration(time.perf_counter() - self.started)
            warn(
                f"train.minutes: the command takes longer than {length.train.minutes:g} min: up to the end of the "
                f"first step it took {took} already; steps get {MIN_FRACTION:.0%} of the minutes"
            )


def fitting_steps(length: RunLength, done: int, seconds: float, tokens_per_second: float, costs: Costs) -> int:
    """The largest number of steps that ends within `seconds`, with evaluations and saves, and within
    `train.max_epochs`; at least `done`."""
    train = length.train
    tokens_done = length.tokens_after(done)

    def fits(steps: int) -> bool:
        if steps > length.max_steps:
            return False
        needed = (length.tokens_after(steps) - tokens_done) / tokens_per_second
        needed += costs.evaluation * length.count_due(train.evaluate_every, done, steps)
        needed += costs.tasks * length.count_due(train.tasks_interval, done, steps)
        needed += costs.save * length.count_due(train.save_every, done, steps)
        return needed <= seconds

    low = done  # binary search: `low` steps fit, `high` do not
    high = done + 1
    while fits(high):
        low = high
        high = 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
