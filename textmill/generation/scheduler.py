"""Scheduler: requests from many sides, continued together by one thread; the model runs in that thread only."""

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
    describe_hang,
    max_new_tokens_served,
)

Deliver = Callable[[Token | Done], None]

AFTER = 5.0
"""Seconds that closing waits for a step that does not end."""
OFTEN = 3
"""Steps that fail one after the other until the model is taken for broken."""
READ_AT_ONCE = 8192
"""Tokens of the prompts that are let in together, unless one prompt alone has more."""
PREFILL_SECONDS, MAX_JOIN_WAIT = 0.0015, 0.04
"""Seconds for which a reading of prompts holds up each text at work, about, however few join by it; and those that nobody waits beyond for
others to join with."""
FIRST = tuple(
    SampleConfig(temperature=heat, top_k=k, min_tokens=least)
    for heat, k in ((0, 0), (0.8, 0), (0.8, 50))
    for least in (0, 1)
)
"""Ways to choose a token that are tried before the first request: kernels are compiled when they are first wanted."""


@dataclass
class Job:
    """A request that was taken."""

    number: int
    request: Request
    room: int
    deliver: Deliver
    deadline: float | None
    came: float
    """When it was taken."""
    ending: FinishReason | None = None
    """Why it is to end before its time."""


class Scheduler:
    """Slots for so many texts at work and a queue for so many that wait.

    Every request that was taken gets exactly one Done, whatever happens. A request ends, is cancelled or runs out of time between two
    steps, and its slot is free for the next one at once. `after` is called by the scheduler's thread when what came of a step is
    delivered.
    """

    def __init__(
        self, generator: Generator, *, slots: int, queue: int, after: Callable[[], None] = lambda: None
    ) -> None:
        self.generator, self.slots, self.queue, self._after = generator, slots, queue, after
        self.vocab, self.positions, self.tokenizer = generator.tokenizer.vocab, generator.positions, generator.tokenizer
        self._batch: Batch = generator.new_batch(slots)
        self._change = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._active: dict[int, Job] = {}
        self._until: float | None = None
        self._due = math.inf
        """When somebody may have to end before the time comes by itself: looked at then, and not at every step."""
        self._requests = self._tokens = self._cancelled = self._failed = 0
        self._begun: float | None = None
        self._thread = threading.Thread(target=self._live, name="textmill-scheduler", daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Deliver, deadline: float | None = None) -> int:
        """Queue a request; its number. `deliver` is called from the scheduler's thread for every token, and once with Done.

        `deadline` is a time of `time.monotonic()`. Raises QueueFull, or TextmillError for what cannot be done.
        """
        room = max_new_tokens_served(request, self.positions, self.vocab)
        with self._change:
            if self._until is not None:
                raise TextmillError("the server is closing; ask again when it is back")
            if not self._thread.is_alive():
                raise TextmillError(self._problem(0.0))
            if len(self._waiting) >= self.queue + max(self.slots - len(self._active), 0):
                raise QueueFull
            self._requests += 1
            job = Job(self._requests, request, room, deliver, deadline, time.monotonic())
            self._waiting.append(job)
            self._due = min(self._due, math.inf if deadline is None else deadline)
            self._change.notify()
            return job.number

    def cancel(self, number: int) -> None:
        """End a request between this step and the next; one that is over already is left alone."""
        with self._change:
            for job in (*self._waiting, *self._active.values()):
                if job.number == number:
                    self._cancel(job)
            self._change.notify()

    def _cancel(self, job: Job) -> None:
        job.ending, self._due = job.ending or "cancelled", -math.inf

    def stats(self) -> dict[str, int | float]:
        """How much is going on."""
        with self._change:
            return {
                "active": len(self._active), "waiting": len(self._waiting), "slots": self.slots, "queue": self.queue,
                "tokens": self._tokens, "requests": self._requests, "cancelled": self._cancelled,
            }  # fmt: skip

    def problem(self, patience: float) -> str:
        """What is wrong with the model, in words; empty: nothing. A step may take `patience` seconds."""
        with self._change:
            return self._problem(patience) if self._until is None else ""

    def _problem(self, patience: float) -> str:
        if not self._thread.is_alive():
            return "the model's thread has died; restart the server"
        if (seconds := self.stuck()) > patience:
            return describe_hang(seconds)
        return f"the model's last {self._failed} steps failed; restart the server" if self._failed >= OFTEN else ""

    def stuck(self) -> float:
        """Seconds that the step under way has taken; 0: there is none."""
        begun = self._begun
        return 0.0 if begun is None else time.monotonic() - begun

    def warm(self) -> None:
        """Have a GPU make ready what requests will need, before there are any, and say how long it took; a CPU has nothing to do."""
        begun = time.monotonic()
        if count := self._batch.slots.warm():
            for sample, texts in product(
                FIRST, {min(1 << power, self.slots) for power in range(self.slots.bit_length() + 1)}
            ):
                for number in range(texts):
                    self._batch.add(number, Request((self.tokenizer.end,), sample), room=2)
                while self._batch.rows or self._batch.waiting:
                    self._batch.step()
            warn(f"{count} steps and readings captured in {time.monotonic() - begun:.1f} s")

    def close(self, grace: float) -> None:
        """Take nothing more; what was taken may finish within so many seconds and is cancelled then.

        Returns when all is over, or some seconds after the grace if the model is stuck in a step.
        """
        with self._change:
            until = time.monotonic() + grace
            self._until = until if self._until is None else min(self._until, until)
            self._due = min(self._due, self._until)
            self._change.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(grace + AFTER)

    def _live(self) -> None:
        """Work until closed; should that ever fail, everyone is told."""
        try:
            self._work()
        except BaseException as error:
            with self._change:
                jobs, self._active, self._waiting = [*self._active.values(), *self._waiting], {}, deque()
            warn(f"the model's thread has died ({type(error).__name__}: {error}); restart the server")
            for job in jobs:
                self._tell(job, Done("error", 0, "", "the model's thread has died; restart the server"))
            self._after()

    def _work(self) -> None:
        while True:
            with self._change:
                while not self._waiting and not self._active and self._until is None:
                    self._change.wait()
                ended = self._end_some()
                if not self._waiting and not self._active and not ended and self._until is not None:
                    return
                new = self._admit()
            for job, reason in ended:
                self._tell(job, self._batch.drop(job.number, reason) or Done(reason, 0, ""))
            if self._active:
                self._step(new)
            self._after()

    def _end_some(self) -> list[tuple[Job, FinishReason]]:
        """Take out what was cancelled, is out of time, or has no time left to finish in."""
        if (now := time.monotonic()) < self._due:
            return []
        jobs = (*self._waiting, *self._active.values())
        for job in jobs:
            if job.ending is None and job.deadline is not None and now >= job.deadline:
                job.ending = "timeout"
            if job.ending is None and self._until is not None and now >= self._until:
                job.ending = "cancelled"
        left = [job.deadline for job in jobs if job.ending is None and job.deadline is not None]
        self._due = min([*left, math.inf if self._until is None or now >= self._until else self._until])
        ended = [(job, job.ending) for job in jobs if job.ending is not None]
        self._waiting = deque(job for job in self._waiting if job.ending is None)
        for job, reason in ended:
            self._active.pop(job.number, None)
            self._cancelled += reason == "cancelled"
        return ended

    def _admit(self) -> list[Job]:
        """Give free slots to those that wait longest; long prompts join one by one, so that texts at work do not stand still.

        Newcomers wait for others to join with until they have lost as much time together as their reading will cost the texts at work.
        """
        new, read, now = list[Job](), 0, time.monotonic()
        waits = [now - job.came for job in self._waiting]
        if waits and sum(waits) < PREFILL_SECONDS * len(self._active) and waits[0] < MAX_JOIN_WAIT:
            return new
        while (
            self._waiting
            and len(self._active) < self.slots
            and (not read or read + len(self._waiting[0].request.ids) <= READ_AT_ONCE)
        ):
            job = self._waiting.popleft()
            read += len(job.request.ids)
            self._active[job.number] = job
            new.append(job)
        return new

    def _step(self, new: list[Job]) -> None:
        self._begun = time.monotonic()
        try:
            for job in new:
                self._batch.add(job.number, job.request, job.room)
            events = self._batch.step()
        except Exception as error:
            self._begun = None
            self._fail(error)
            return
        self._begun, self._failed = None, 0
        over = [number for number, event in events if isinstance(event, Done)]
        told = [(self._active[number], event) for number, event in events]
        self._tokens += len(told) - len(over)
        if over:
            with self._change:
                for number in over:
                    self._active.pop(number)
        for job, event in told:
            self._tell(job, event)

    def _fail(self, error: Exception) -> None:
        """The model could not do a step: those at work are told, and the slots start anew."""
        self._failed += 1
        message = str(error) if isinstance(error, TextmillError) else f"the model failed: {type(error).__name__}"
        warn(f"{type(error).__name__}: {error}")
        with self._change:
            jobs, self._active = list(self._active.values()), {}
        ended = {row.number: row.done("error", message) for row in (*self._batch.rows, *self._batch.waiting)}
        self._batch.clear()
        for job in jobs:
            self._tell(job, ended.get(job.number) or Done("error", 0, "", message))

    def _tell(self, job: Job, event: Token | Done) -> None:
        """Hand over what there is; one who cannot take it is taken for gone."""
        try:
            job.deliver(event)
        except Exception as error:
            if not isinstance(event, Done):
                warn(f"request {job.number}: its reader failed ({type(error).__name__}); it is cancelled")
                self._cancel(job)


def open_scheduler(
    checkpoint: Checkpoint, engine: EngineConfig, serve: ServeConfig, after: Callable[[], None] = lambda: None
) -> Scheduler:
    """A checkpoint in memory, ready for requests."""
    generator = open_generator(checkpoint, engine, apart=serve.adapter == "apart")
    scheduler = Scheduler(generator, slots=serve.slots, queue=serve.queue, after=after)
    scheduler.warm()
    return scheduler
