"""The time of steps: the throughput in the log, and how many steps fit in `train.minutes`.

With `train.minutes`, step 1 compiles and is not timed. After step 4 there is a first estimate of the number of steps,
which fixes a warm-up that is a fraction of the run. After step 51, or a tenth of a shorter run, the final number is
computed; from then on the run is as deterministic as one with `train.steps`.
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

ESTIMATE_STEPS = 3
MEASURED_STEPS = 50
"""Timed steps before the first estimate, and before the final number of steps is computed."""
MEASURED_FRACTION = 0.1
"""In a short run, this fraction of it is timed instead."""
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


class MinutesTimer:
    """Times the first steps. Rank 0's clock decides; all ranks call `after_step` together and get the same length."""

    def __init__(
        self,
        started: float,
        evaluates: bool,
        first: int,
        ranks: Ranks,
        log: StepLog,
        measure_costs: Callable[[], Costs],
    ) -> None:
        """`started` is when the command started, by `time.perf_counter`; `evaluates`: it evaluates after training.

        `first` is the first step of this process, which is not timed: it includes compilation.
        """
        self.started = started
        self.evaluates = evaluates
        self.first = first
        self.ranks = ranks
        self.log = log
        self.measure_costs = measure_costs
        self._last_timed_step: int | None = None
        """The step after which the final number is computed; None before the first estimate."""

    def after_step(self, length: RunLength, done: int, result: Step) -> RunLength:
        """The length of the run after `done` steps: changed after the first estimate, and when it is known."""
        if self._last_timed_step is None:
            length = self._estimate(length, done, result)
        if done != self._last_timed_step:
            return length
        with self.log.paused(result):
            speed = self._tokens_per_second(length, done)
            costs = self.measure_costs()
        steps = fitting_steps(length, done, self._seconds_for_steps(length, costs.full_pass), speed, costs)
        steps = self.ranks.all_gather(steps)[0]
        return run_on_all(self.ranks, lambda: length.with_measured_steps(steps, done))

    def _estimate(self, length: RunLength, done: int, result: Step) -> RunLength:
        """The length with a first estimate of the steps; unchanged if too few steps are timed."""
        _ = result.loss  # waits until the step is finished
        if done == self.first:
            self._timed_from = self._step_clock()
            self._warn_of_late_start(length)
            if done < length.max_steps:
                return length
        self._last_timed_step, steps = self.ranks.all_gather(self._first_estimate(length, done))[0]
        return length if self._last_timed_step is None else length.with_estimated_steps(steps)

    def _step_clock(self) -> float:
        """A clock that stands still during evaluations and saves."""
        return time.perf_counter() - self.log.paused_seconds

    def _seconds_left(self, length: RunLength) -> float:
        """Seconds until training must end; what follows it is subtracted, except a pass over the valid split."""
        assert length.train.minutes is not None
        end = self.started + 60 * length.train.minutes - (END_SECONDS if self.evaluates else 0.0)
        return end - time.perf_counter()

    def _seconds_for_steps(self, length: RunLength, full_pass: float = 0.0) -> float:
        """Seconds that steps get from now on: a model of a few steps would be of no use."""
        assert length.train.minutes is not None
        left = self._seconds_left(length) - (full_pass if self.evaluates else 0.0)
        return max(left, MIN_FRACTION * 60 * length.train.minutes)

    def _warn_of_late_start(self, length: RunLength) -> None:
        """An error would leave the user without a model after all stages before."""
        if self.ranks.first and self._seconds_left(length) <= 0:
            took = format_duration(time.perf_counter() - self.started)
            warn(
                f"train.minutes: the command takes longer than {length.train.minutes:g} min: up to the end of the "
                f"first step it took {took} already; steps get {MIN_FRACTION:.0%} of the minutes"
            )

    def _tokens_per_second(self, length: RunLength, done: int) -> float:
        tokens = length.tokens_after(done) - length.tokens_after(self.first)
        return tokens / max(1e-9, self._step_clock() - self._timed_from)

    def _first_estimate(self, length: RunLength, done: int) -> tuple[int | None, int]:
        """(last step to time, estimated number of steps of the run); None if too few steps are timed so far."""
        seconds_left = self._seconds_for_steps(length)
        seconds_timed = self._step_clock() - self._timed_from
        enough = done - self.first >= ESTIMATE_STEPS or seconds_timed >= MEASURED_FRACTION * seconds_left
        if not enough and done < length.max_steps:
            return None, 0
        steps = fitting_steps(length, done, seconds_left, self._tokens_per_second(length, done), Costs(0.0, 0.0, 0.0))
        timed_steps = min(MEASURED_STEPS, round(MEASURED_FRACTION * (steps - self.first)))
        return max(done, self.first + timed_steps), steps


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
