"""A thread that runs a model for many requests at a time; every accepted request ends exactly once.

`scheduler.Scheduler` (new text) and `encoders.encoder.EncoderThread` (embeddings and masks) are such threads. They
differ in what one step computes, which is their `Work`. The life of a request:

    submit() -> waiting -> active -> its last event, Done

It is waiting until a slot is free and the work lets it join; then it is active, and each step delivers what is new. It
may end early: it is cancelled or out of time, a step fails, or the thread closes or dies.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from textmill.errors import TextmillError, warn
from textmill.generation.requests import Done, FinishReason, QueueFull, Token, describe_problem
from textmill.generation.turns import Turns

CLOSE_SECONDS = 5.0
"""How long `close` waits for a step that does not end."""
THREAD_DIED = "the model's thread has died; restart the server"

DeliverEvent = Callable[[Token | Done], None]
WorkItem = TypeVar("WorkItem")
"""What the work needs to know of a request."""


@dataclass(eq=False)
class Job(Generic[WorkItem]):
    """A request that was accepted and has not ended."""

    number: int
    item: WorkItem
    deliver: DeliverEvent
    deadline: float
    queued_at: float
    end_reason: FinishReason | None = None
    """Set when the request must end early, before the next step."""


class Work(Protocol[WorkItem]):
    """Computes the active requests; only the model's thread calls it."""

    def count_joining(self, waiting: Sequence[Job[WorkItem]], active: int, now: float) -> int:
        """Return how many of the waiting jobs, which are sorted by age, may join now; there may be fewer free slots."""
        ...

    def add(self, number: int, item: WorkItem) -> None:
        """Let a request join at the next step."""
        ...

    def step(self) -> list[tuple[int, Token | Done]]:
        """Compute the next part of every request; return the new events with the requests' numbers."""
        ...

    def drop(self, number: int, reason: FinishReason) -> Done | None:
        """End a request early and return its last event; None if it has not joined."""
        ...

    def fail(self, message: str) -> dict[int, Done]:
        """End every request that has been added, with an error; return their last events."""
        ...


class ModelThread(Generic[WorkItem]):
    """Runs up to `slots` requests at a time and queues up to `queue` more.

    Requests join, end, are cancelled or time out between two steps. `after_step` is called in the thread after each
    step's events. Threads that share a model compute in `turns`.
    """

    def __init__(
        self,
        name: str,
        work: Work[WorkItem],
        *,
        slots: int,
        queue: int,
        after_step: Callable[[], None],
        turns: Turns | None,
    ) -> None:
        self.slots = slots
        self.queue = queue
        self._work, self._after_step, self._turns = work, after_step, turns or Turns()
        self._changed = threading.Condition()
        self._waiting: dict[int, Job[WorkItem]] = {}
        self._active: dict[int, Job[WorkItem]] = {}
        self._closing = self._died = False
        self._close_at = math.inf
        self._next_deadline = math.inf
        """When a request may have to end early. Jobs are checked only then, not at every step."""
        self._requests = self._tokens = self._cancelled = self._failed_steps = 0
        self._step_started: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _enqueue(self, item: WorkItem, deliver: DeliverEvent, deadline: float | None) -> int:
        """Queue a request and return its number; raise QueueFull, or TextmillError if the thread accepts none."""
        with self._changed:
            if self._closing:
                raise TextmillError("the server is closing; send the request again when it is back")
            if self._died:
                raise TextmillError(THREAD_DIED)
            if len(self._waiting) + len(self._active) >= self.slots + self.queue:
                raise QueueFull
            self._requests += 1
            job = Job(self._requests, item, deliver, math.inf if deadline is None else deadline, time.monotonic())
            self._waiting[job.number] = job
            self._next_deadline = min(self._next_deadline, job.deadline)
            self._changed.notify()
            return job.number

    def cancel(self, number: int) -> None:
        """End a request before the next step; nothing happens if it has ended already."""
        with self._changed:
            job = self._waiting.get(number) or self._active.get(number)
            if job is not None and job.end_reason is None:
                job.end_reason = "cancelled"
                self._next_deadline = -math.inf

    def stats(self) -> dict[str, int | float]:
        """Return the counts for /metrics."""
        with self._changed:
            return {
                "active": len(self._active),
                "waiting": len(self._waiting),
                "slots": self.slots,
                "queue": self.queue,
                "tokens": self._tokens,
                "requests": self._requests,
                "cancelled": self._cancelled,
            }

    def problem(self, max_step_seconds: float) -> str:
        """Describe what is wrong with the model; empty if nothing is."""
        if self._closing:
            return ""
        if self._died:
            return THREAD_DIED
        return describe_problem(self.step_seconds(), max_step_seconds, self._failed_steps)

    def step_seconds(self) -> float:
        """Return how long the current step has taken; 0 between steps."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def start_closing(self, grace: float) -> None:
        """Accept nothing more; let accepted requests finish for `grace` seconds, then cancel them.

        A second call may shorten the time, but not extend it.
        """
        with self._changed:
            self._closing = True
            self._close_at = min(self._close_at, time.monotonic() + grace)
            self._next_deadline = min(self._next_deadline, self._close_at)
            self._changed.notify()

    def close(self, grace: float) -> None:
        """`start_closing`, and wait until all requests have ended; a few seconds more if the model hangs in a step."""
        self.start_closing(grace)
        if threading.current_thread() is not self._thread:
            self._thread.join(grace + CLOSE_SECONDS)

    def _run(self) -> None:
        """Work until closed. If this thread fails, every request ends with an error."""
        try:
            while self._wait_for_requests():
                self._end_early()
                new = self._admit()
                if self._active:
                    self._step(new)
                self._after_step()
        except BaseException as error:
            with self._changed:
                self._died = True  # from here on, no request is accepted
                jobs = [*self._active.values(), *self._waiting.values()]
            warn(f"the model's thread has died ({type(error).__name__}: {error}); restart the server")
            for job in jobs:
                self._end(job, Done("error", 0, "", THREAD_DIED))
            self._after_step()

    def _wait_for_requests(self) -> bool:
        """Wait until there is a request; return False if the thread is closed instead."""
        with self._changed:
            while not self._waiting and not self._active:
                if self._closing:
                    return False
                self._changed.wait()
            return True

    def _end_early(self) -> None:
        """End jobs that were cancelled or timed out, and all jobs once the grace of `close` is over."""
        now = time.monotonic()
        if now < self._next_deadline:
            return
        with self._changed:
            jobs = [*self._waiting.values(), *self._active.values()]
            for job in jobs:
                if job.end_reason is None and now >= job.deadline:
                    job.end_reason = "timeout"
                elif job.end_reason is None and now >= self._close_at:
                    job.end_reason = "cancelled"
            deadlines = [job.deadline for job in jobs if job.end_reason is None]
            self._next_deadline = min([*deadlines, self._close_at])
        for job in jobs:
            if job.end_reason is not None:
                self._end(job, self._work.drop(job.number, job.end_reason) or Done(job.end_reason, 0, ""))

    def _admit(self) -> list[Job[WorkItem]]:
        """Give free slots to the jobs that have waited longest, if the work lets them join."""
        free = self.slots - len(self._active)
        if not self._waiting or not free:
            return []
        with self._changed:
            waiting = list(self._waiting.values())
            count = self._work.count_joining(waiting, len(self._active), time.monotonic())
            new = waiting[: min(count, free)]
            for job in new:
                self._active[job.number] = self._waiting.pop(job.number)
            return new

    def _step(self, new: list[Job[WorkItem]]) -> None:
        self._step_started = time.monotonic()
        try:
            with self._turns:
                for job in new:
                    self._work.add(job.number, job.item)
                events = self._work.step()
        except Exception as error:
            self._step_started = None
            self._fail(error)
            return
        self._step_started = None
        self._failed_steps = 0
        for number, event in events:
            if isinstance(event, Done):
                self._end(self._active[number], event)
            else:
                self._tokens += 1
                self._deliver(self._active[number], event)

    def _fail(self, error: Exception) -> None:
        """End all active requests after a failed step."""
        self._failed_steps += 1
        message = str(error) if isinstance(error, TextmillError) else f"the model failed: {type(error).__name__}"
        warn(f"{type(error).__name__}: {error}")
        ends = self._work.fail(message)
        for job in list(self._active.values()):
            # A job whose `add` has failed is unknown to the work.
            self._end(job, ends.get(job.number) or Done("error", 0, "", message))

    def _end(self, job: Job[WorkItem], done: Done) -> None:
        """Deliver a job's last event. Until then it is in `_waiting` or `_active`, so that no failure can lose it."""
        with self._changed:
            self._waiting.pop(job.number, None)
            self._active.pop(job.number, None)
            self._cancelled += done.reason == "cancelled"
        self._deliver(job, done)

    def _deliver(self, job: Job[WorkItem], event: Token | Done) -> None:
        """Pass an event to the job's `deliver`; cancel the job if that fails."""
        try:
            job.deliver(event)
        except Exception as error:
            if job.end_reason is None:
                warn(f"request {job.number}: delivering its text failed ({type(error).__name__}); cancelled it")
            self.cancel(job.number)
