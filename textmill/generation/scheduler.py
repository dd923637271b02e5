"""Continuous batching: one thread computes the requests of a model, which join and leave between any two steps.

A step gives each text of a `RunningBatch` one more token, and computes a share of the embeddings and masks of an
`EncoderBatch`; a model has one of them, or both. Every accepted request ends exactly once:

    submit() -> waiting -> active -> its last event, Done

It is waiting until a slot is free and the thread lets it join; then it is active, and each step delivers what is new.
It may end early: it is cancelled or out of time, a step fails, or the thread closes or dies.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EmbedConfig, EngineConfig, SampleConfig, ServeConfig
from textmill.devices import open_device
from textmill.errors import TextmillError, warn
from textmill.generation.batch import RunningBatch
from textmill.generation.embed import can_embed, new_text_encoder
from textmill.generation.encoder import Embedder, EncoderBatch, Filler, open_embedder
from textmill.generation.fill import new_masked_texts
from textmill.generation.generator import Generator, check_memory, open_generator
from textmill.generation.requests import (
    Done,
    EncoderRequest,
    FinishReason,
    ModelStats,
    QueueFull,
    Request,
    Token,
    describe_hang,
)
from textmill.models import has_masked_head, open_family, read_shape

CLOSE_SECONDS = 5.0
"""How long `close` waits for a step that does not end."""
MAX_FAILED_STEPS = 3
"""Failed steps in a row after which the model counts as broken."""
THREAD_DIED = "the model's thread has died; restart the server"

MAX_JOINING_TOKENS = 8192
"""Most prompt tokens that join in one step, unless a single prompt has more."""
PREFILL_SECONDS = 0.0015
"""About how long one prefill delays each running text, however few prompts it reads."""
MAX_JOIN_WAIT = 0.04
"""Longest time that a request with a free slot waits for others to join with."""
WARM_UP_SAMPLES = tuple(
    SampleConfig(temperature=temperature, top_k=k, top_p=p, min_tokens=least, max_tokens=2)
    for temperature, k, p in ((0, 0, 1), (0.8, 0, 1), (0.8, 50, 1), (0.8, 0, 0.9), (0.8, 50, 0.9))
    for least in (0, 1)
)
"""Sampling settings that are tried before the first request, because kernels are compiled at first use."""

DeliverEvent = Callable[[Token | Done], None]
Batch = RunningBatch | EncoderBatch


@dataclass(eq=False)
class Job:
    """A request that was accepted and has not ended."""

    number: int
    request: Any
    batch: Batch
    """What computes it."""
    deliver: DeliverEvent
    deadline: float
    queued_at: float
    end_reason: FinishReason | None = None
    """Set when the request must end early, before the next step."""


class Scheduler:
    """Runs up to `slots` texts and as many encoder requests at a time, and queues up to `queue` more requests.

    `after_step` is called in the thread after each step's events.
    """

    def __init__(
        self,
        generator: Generator | None,
        encoder: EncoderBatch | None = None,
        *,
        slots: int,
        queue: int,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.slots = slots
        self.queue = queue
        self._batch: RunningBatch | None = None
        self._encoder = encoder
        if generator is not None:
            generator.keep_texts(slots)
            self._batch = generator.new_batch(slots)
        self._after_step = after_step
        self._changed = threading.Condition()
        self._waiting: dict[int, Job] = {}
        self._active: dict[int, Job] = {}
        self._closing = self._died = False
        self._close_at = math.inf
        self._next_deadline = math.inf
        """When a request may have to end early. Jobs are checked only then, not at every step."""
        self._stats = ModelStats(0, 0, slots, queue)
        self._failed_steps = 0
        self._step_started: float | None = None
        self._thread = threading.Thread(target=self._run, name="textmill-scheduler", daemon=True)
        self._thread.start()

    def submit(self, request: Request | EncoderRequest, deliver: DeliverEvent, deadline: float | None = None) -> int:
        """Queue a request and return its number.

        `deliver` is called in the scheduler's thread for every token, then once with Done. `deadline` is a
        `time.monotonic()` time. Raises QueueFull, or TextmillError if the request cannot be done.
        """
        batch: Any = self._batch if isinstance(request, Request) else self._encoder
        if batch is None:
            raise TextmillError("the model cannot do this")
        batch.check(request)
        with self._changed:
            if self._closing:
                raise TextmillError("the server is closing; send the request again when it is back")
            if self._died:
                raise TextmillError(THREAD_DIED)
            if len(self._waiting) + len(self._active) >= self.slots + self.queue:
                raise QueueFull
            self._stats.requests += 1
            number = self._stats.requests
            ends_at = math.inf if deadline is None else deadline
            self._waiting[number] = Job(number, request, batch, deliver, ends_at, time.monotonic())
            self._next_deadline = min(self._next_deadline, ends_at)
            self._changed.notify()
            return number

    def cancel(self, number: int) -> None:
        """End a request before the next step; nothing happens if it has ended already."""
        with self._changed:
            job = self._waiting.get(number) or self._active.get(number)
            if job is not None and job.end_reason is None:
                job.end_reason = "cancelled"
                self._next_deadline = -math.inf

    def stats(self) -> ModelStats:
        """Return what the thread does and has done."""
        with self._changed:
            return replace(self._stats, active=len(self._active), waiting=len(self._waiting))

    def problem(self, max_step_seconds: float) -> str:
        """Describe what is wrong with the model; empty if nothing is."""
        if self._closing:
            return ""
        if self._died:
            return THREAD_DIED
        if self.step_seconds() > max_step_seconds:
            return describe_hang(self.step_seconds())
        if self._failed_steps >= MAX_FAILED_STEPS:
            return f"the model's last {self._failed_steps} steps failed; restart the server"
        return ""

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
                for batch in (self._batch, self._encoder):
                    if batch is not None:
                        self._step(batch)
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
                self._end(job, job.batch.drop(job.number, job.end_reason) or Done(job.end_reason, 0, ""))

    def _step(self, batch: Batch) -> None:
        """Let waiting requests join a batch, and compute one step of it."""
        new = self._admit(batch)
        if not any(job.batch is batch for job in self._active.values()):
            return
        self._step_started = time.monotonic()
        try:
            for job in new:
                batch.add(job.number, job.request)
            events = batch.step()
        except Exception as error:
            self._step_started = None
            self._fail(batch, error)
            return
        self._step_started = None
        failed = [isinstance(event, Done) and event.reason == "error" for _, event in events]
        if failed:  # a step that runs ahead may have no events
            self._failed_steps = self._failed_steps + 1 if all(failed) else 0
        for number, event in events:
            if isinstance(event, Done):
                self._end(self._active[number], event)
            else:
                self._stats.tokens += 1
                self._deliver(self._active[number], event)

    def _admit(self, batch: Batch) -> list[Job]:
        """Give free slots of a batch to the jobs that have waited longest, if they may join."""
        if not self._waiting:
            return []
        with self._changed:
            waiting = [job for job in self._waiting.values() if job.batch is batch]
            active = sum(job.batch is batch for job in self._active.values())
            count = len(waiting)  # an encoder request delays the others by no more than a step
            if batch is self._batch and waiting and active < self.slots:
                count = count_joining(waiting, active, time.monotonic())
            new = waiting[: min(count, self.slots - active)]
            for job in new:
                self._active[job.number] = self._waiting.pop(job.number)
            return new

    def _fail(self, batch: Batch, error: Exception) -> None:
        """End all active requests of a batch after a failed step."""
        self._failed_steps += 1
        message = str(error) if isinstance(error, TextmillError) else f"the model failed: {type(error).__name__}"
        warn(f"{type(error).__name__}: {error}")
        ends = batch.fail(message)
        for job in [job for job in self._active.values() if job.batch is batch]:
            # A job that could not be added has no last event.
            self._end(job, ends.get(job.number) or Done("error", 0, "", message))

    def _end(self, job: Job, done: Done) -> None:
        """Deliver a job's last event. Until then it is in `_waiting` or `_active`, so that no failure can lose it."""
        with self._changed:
            self._waiting.pop(job.number, None)
            self._active.pop(job.number, None)
            self._stats.cancelled += done.reason == "cancelled"
        self._deliver(job, done)

    def _deliver(self, job: Job, event: Token | Done) -> None:
        """Pass an event to the job's `deliver`; cancel the job if that fails."""
        try:
            job.deliver(event)
        except Exception as error:
            if job.end_reason is None:
                warn(f"request {job.number}: delivering its text failed ({type(error).__name__}); cancelled it")
            self.cancel(job.number)

    def warm_up(self) -> None:
        """Capture CUDA graphs and compile kernels before the first request; on a CPU there is nothing to do."""
        assert self._batch is not None
        started = time.monotonic()
        if count := self._batch.slots.warm_up():
            sizes = {min(1 << power, self.slots) for power in range(self.slots.bit_length() + 1)}
            for sample, texts in product(WARM_UP_SAMPLES, sizes):
                for number in range(texts):
                    self._batch.add(number, Request((self._batch.tokenizer.eos_id,), sample))
                while not self._batch.is_empty:
                    self._batch.step()
            warn(f"captured {count} decoding steps and prefills in {time.monotonic() - started:.1f} s")

    def check_model(self) -> None:
        """Generate one token; raise if the model cannot, because its weights are not finite."""
        assert self._batch is not None
        self._batch.add(0, Request((self._batch.tokenizer.eos_id,), SampleConfig(temperature=0, max_tokens=1)))
        while not self._batch.is_empty:
            for _, event in self._batch.step():
                if isinstance(event, Done) and event.reason == "error":
                    raise TextmillError(event.message)


def count_joining(waiting: Sequence[Job], active: int, now: float) -> int:
    """Return how many of the waiting texts, which are sorted by age, may join now.

    A prefill delays all running texts. So new texts wait for each other until their summed waiting time is as large as
    the summed delay, or one of them has waited long enough. With 20 running texts the delay is 20 x 1.5 ms: one text
    joins after 30 ms, three that came together join after 10 ms. Long prompts join one at a time.
    """
    waits = [now - job.queued_at for job in waiting]
    if sum(waits) < PREFILL_SECONDS * active and waits[0] < MAX_JOIN_WAIT:
        return 0
    tokens = 0
    for count, job in enumerate(waiting):
        tokens += len(job.request.ids)
        if count and tokens > MAX_JOINING_TOKENS:
            return count
    return len(waiting)


def open_scheduler(
    checkpoint: Checkpoint,
    engine: EngineConfig,
    serve: ServeConfig,
    embed: EmbedConfig,
    after_step: Callable[[], None] = lambda: None,
) -> Scheduler:
    """Load a checkpoint and return a scheduler that is ready for requests, for all that its net can do."""
    check_memory(checkpoint, open_device(engine.device))
    shape = read_shape(checkpoint.folder)
    limits = {"slots": serve.slots, "queue": serve.queue}
    if open_family(shape.family).OBJECTIVE == "masked":
        embedder = open_embedder(checkpoint, engine, embed)
        filler = None
        if has_masked_head(shape):
            texts = new_masked_texts(embedder.texts.tokenizer, shape.positions, checkpoint.folder)
            filler = Filler(embedder.net, texts)
        return Scheduler(None, EncoderBatch(embedder, filler), after_step=after_step, **limits)
    generator = open_generator(checkpoint, engine)
    encoder = None
    if can_embed(shape):
        encoder_texts, pooling = new_text_encoder(shape, generator.tokenizer, embed, checkpoint.folder)
        encoder = EncoderBatch(Embedder(generator.net, encoder_texts, pooling, str(checkpoint.folder)), None)
    scheduler = Scheduler(generator, encoder, after_step=after_step, **limits)
    scheduler.warm_up()
    scheduler.check_model()
    return scheduler
