"""The log of a run: a step is told of when its numbers have come, with the rate of the steps since the one told of before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from textmill.course import Course


class Step(Protocol):
    """A step's result, as far as it is asked here."""

    @property
    def loss(self) -> float: ...
    @property
    def ready(self) -> bool: ...


Result = TypeVar("Result", bound=Step)


class Logbook(Generic[Result]):
    """Tells of a step while the device is at work on the next one, if it still was on this one; a rate is of work that is done."""

    def __init__(self, course: Course, step: int, tell: Callable[[int, Result, float], None]) -> None:
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
