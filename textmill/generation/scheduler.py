"""Continuous batching: one thread runs the model for many requests, which join and leave between any two steps."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EngineConfig, SampleConfig, ServeConfig
from textmill.errors import TextmillError, warn
from textmill.generation.batch import Batch
from textmill.generation.generator import Generator, open_generator
from textmill.generation.requests import (
    Done,
    FinishReason,
    QueueFull,
    Request,
    Token,
    describe_problem,
    max_new_tokens_served,
)
from textmill.generation.turns import Turns

DeliverEvent = Callable[[Token | Done], None]

CLOSE_SECONDS = 5.0
"""How long `close` waits for a step that does not end."""
PREFILL_TOKENS = 8192
"""Prompt tokens that join in one step, unless a single prompt has more."""
PREFILL_SECONDS = 0.0015
"""About how long one prefill delays each running text, however few prompts it reads."""
MAX_JOIN_WAIT = 0.04
"""Longest time that a request with a free slot waits for others to join with."""
WARM_UP_SAMPLES = tuple(
    SampleConfig(temperature=temperature, top_k=k, min_tokens=least)
    for temperature, k in ((0, 0), (0.8, 0), (0.8, 50))
    for least in (0, 1)
)
"""Sampling settings that are tried before the first request, because kernels are compiled at first use."""


@dataclass
class Job:
    """A request that the scheduler has accepted."""

    number: int
    request: Request
    max_new: int
    deliver: DeliverEvent
    deadline: float | None
    queued_at: float
    end_reason: FinishReason | None = None
    """Set when the request must end early."""


class Scheduler:
    """Runs up to `slots` requests at a time and queues up to `queue` more.

    Every accepted request gets exactly one Done, whatever happens. Requests end, are cancelled or time out between two
    steps; their slots are free at once. `after_step` is called in the scheduler's thread after each step's events.
    """

    def __init__(
        self, generator: Generator, *, slots: int, queue: int, after_step: Callable[[], None] = lambda: None,
        turns: Turns | None = None,
    ) -> None:  # fmt: skip
        self.generator, self.slots, self.queue, self._after_step = generator, slots, queue, after_step
        self._turns = turns or Turns()
        self.vocab, self.positions, self.tokenizer = generator.tokenizer.vocab, generator.positions, generator.tokenizer
        self._batch: Batch = generator.new_batch(slots)
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._active: dict[int, Job] = {}
        self._close_at: float | None = None
        self._next_deadline = math.inf
        """When a request may have to end early. Jobs are checked only then, not at every step."""
        self._requests = self._tokens = self._cancelled = self._failed_steps = 0
        self._step_started: float | None = None
        self._thread = threading.Thread(target=self._run, name="textmill-scheduler", daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: DeliverEvent, deadline: float | None = None) -> int:
        """Queue a request and return its number.

        `deliver` is called in the scheduler's thread for every token, then once with Done. `deadline` is a
        `time.monotonic()` time. Raises QueueFull, or TextmillError if the request cannot be done.
        """
        max_new = max_new_tokens_served(request, self.positions, self.vocab)
        with self._changed:
            if self._close_at is not None:
                raise TextmillError("the server is closing; send the request again when it is back")
            if not self._thread.is_alive():
                raise TextmillError(self._problem(0.0))
            if len(self._waiting) >= self.queue + max(self.slots - len(self._active), 0):
                raise QueueFull
            self._requests += 1
            job = Job(self._requests, request, max_new, deliver, deadline, time.monotonic())
            self._waiting.append(job)
            self._next_deadline = min(self._next_deadline, math.inf if deadline is None else deadline)
            self._changed.notify()
            return job.number

    def cancel(self, number: int) -> None:
        """End a request before the next step; nothing happens if it has ended already."""
        with self._changed:
            for job in (*self._waiting, *self._active.values()):
                if job.number == number:
                    self._cancel(job)
            self._changed.notify()

    def _cancel(self, job: Job) -> None:
        job.end_reason, self._next_deadline = job.end_reason or "cancelled", -math.inf

    def stats(self) -> dict[str, int | float]:
        """Return the counts for /metrics."""
        with self._changed:
            return {
                "active": len(self._active), "waiting": len(self._waiting), "slots": self.slots, "queue": self.queue,
                "tokens": self._tokens, "requests": self._requests, "cancelled": self._cancelled,
            }  # fmt: skip

    def problem(self, max_step_seconds: float) -> str:
        """Describe what is wrong with the model; empty if nothing is."""
        with self._changed:
            return self._problem(max_step_seconds) if self._close_at is None else ""

    def _problem(self, max_step_seconds: float) -> str:
        alive, seconds = self._thread.is_alive(), self.step_seconds()
        return describe_problem(alive, seconds, max_step_seconds, self._failed_steps)

    def step_seconds(self) -> float:
        """Return how long the current step has taken; 0 between steps."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def warm_up(self) -> None:
        """Capture CUDA graphs and compile kernels before the first request; on a CPU there is nothing to do."""
        started = time.monotonic()
        if count := self._batch.slots.warm_up():
            sizes = {min(1 << power, self.slots) for power in range(self.slots.bit_length() + 1)}
            for sample, texts in product(WARM_UP_SAMPLES, sizes):
                for number in range(texts):
                    self._batch.add(number, Request((self.tokenizer.end,), sample), 2)
                while self._batch.running or self._batch.waiting:
                    self._batch.step()
            warn(f"captured {count} decoding steps and prefills in {time.monotonic() - started:.1f} s")

    def close(self, grace: float) -> None:
        """Accept nothing more; let accepted requests finish for `grace` seconds, then cancel them.

        Returns when all have ended, or a few seconds after the grace if the model hangs in a step.
        """
        with self._changed:
            close_at = time.monotonic() + grace
            self._close_at = close_at if self._close_at is None else min(self._close_at, close_at)
            self._next_deadline = min(self._next_deadline, self._close_at)
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(grace + CLOSE_SECONDS)

    def _run(self) -> None:
        """Work until closed. If this thread fails, every request ends with an error."""
        try:
            self._work()
        except BaseException as error:
            with self._changed:
                jobs, self._active, self._waiting = [*self._active.values(), *self._waiting], {}, deque()
            warn(f"the model's thread has died ({type(error).__name__}: {error}); restart the server")
            for job in jobs:
                self._deliver(job, Done("error", 0, "", "the model's thread has died; restart the server"))
            self._after_step()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._active and self._close_at is None:
                    self._changed.wait()
                ended = self._end_early()
                if not self._waiting and not self._active and not ended and self._close_at is not None:
                    return
                new = self._admit()
            for job, reason in ended:
                self._deliver(job, self._batch.drop(job.number, reason) or Done(reason, 0, ""))
            if self._active:
                self._step(new)
            self._after_step()

    def _end_early(self) -> list[tuple[Job, FinishReason]]:
        """Remove jobs that were cancelled or timed out, and all jobs once the grace is over."""
        if (now := time.monotonic()) < self._next_deadline:
            return []
        jobs = (*self._waiting, *self._active.values())
        for job in jobs:
            if job.end_reason is None and job.deadline is not None and now >= job.deadline:
                job.end_reason = "timeout"
            if job.end_reason is None and self._close_at is not None and now >= self._close_at:
                job.end_reason = "cancelled"
        deadlines = [job.deadline for job in jobs if job.end_reason is None and job.deadline is not None]
        close_at = math.inf if self._close_at is None or now >= self._close_at else self._close_at
        self._next_deadline = min([*deadlines, close_at])
        ended = [(job, job.end_reason) for job in jobs if job.end_reason is not None]
        self._waiting = deque(job for job in self._waiting if job.end_reason is None)
        for job, reason in ended:
            self._active.pop(job.number, None)
            self._cancelled += reason == "cancelled"
        return ended

    def _admit(self) -> list[Job]:
        """Give free slots to the jobs that have waited longest.

        Long prompts join one at a time, so that running texts are not delayed for long. New jobs wait for each other
        until their summed waiting time is as large as the delay that their prefill causes the running texts.
        """
        new, tokens, now = list[Job](), 0, time.monotonic()
        waits = [now - job.queued_at for job in self._waiting]
        if waits and sum(waits) < PREFILL_SECONDS * len(self._active) and waits[0] < MAX_JOIN_WAIT:
            return new
        while (
            self._waiting
            and len(self._active) < self.slots
            and (not tokens or tokens + len(self._waiting[0].request.ids) <= PREFILL_TOKENS)
        ):
            job = self._waiting.popleft()
            tokens += len(job.request.ids)
            self._active[job.number] = job
            new.append(job)
        return new

    def _step(self, new: list[Job]) -> None:
        self._step_started = time.monotonic()
        try:
            with self._turns:
                for job in new:
                    self._batch.add(job.number, job.request, job.max_new)
                events = self._batch.step()
        except Exception as error:
            self._step_started = None
            self._fail(error)
            return
        self._step_started, self._failed_steps = None, 0
        ended = [number for number, event in events if isinstance(event, Done)]
        deliveries = [(self._active[number], event) for number, event in events]
        self._tokens += len(deliveries) - len(ended)
        if ended:
            with self._changed:
                for number in ended:
                    self._active.pop(number)
        for job, event in deliveries:
            self._deliver(job, event)

    def _fail(self, error: Exception) -> None:
        """End all running requests after a failed step, and clear the slots."""
        self._failed_steps += 1
        message = str(error) if isinstance(error, TextmillError) else f"the model failed: {type(error).__name__}"
        warn(f"{type(error).__name__}: {error}")
        with self._changed:
            jobs, self._active = list(self._active.values()), {}
        ended = {text.number: text.finish("error", message) for text in (*self._batch.running, *self._batch.waiting)}
        self._batch.clear()
        for job in jobs:
            self._deliver(job, ended.get(job.number) or Done("error", 0, "", message))

    def _deliver(self, job: Job, event: Token | Done) -> None:
        """Pass an event to the job's `deliver`; cancel the job if that fails."""
        try:
            job.deliver(event)
        except Exception as error:
            if not isinstance(event, Done):
                warn(f"request {job.number}: delivering its text failed ({type(error).__name__}); cancelled it")
                self._cancel(job)


def open_scheduler(
    checkpoint: Checkpoint, engine: EngineConfig, serve: ServeConfig, after_step: Callable[[], None] = lambda: None,
    turns: Turns | None = None,
) -> Scheduler:  # fmt: skip
    """Load a checkpoint and return a scheduler that is ready for requests; others may use the model in `turns`."""
    generator = open_generator(checkpoint, engine, separate_adapter=serve.adapter == "separate")
    scheduler = Scheduler(generator, slots=serve.slots, queue=serve.queue, after_step=after_step, turns=turns)
    scheduler.warm_up()
    return scheduler
