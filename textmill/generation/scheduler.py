"""Continuous batching: one thread generates the texts of many requests, which join and leave between any two steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EngineConfig, SampleConfig, ServeConfig
from textmill.errors import warn
from textmill.generation.batch import RunningBatch
from textmill.generation.generator import Generator, open_generator
from textmill.generation.model_thread import DeliverEvent, Job, ModelThread
from textmill.generation.requests import Done, FinishReason, Request, Token, max_new_tokens_served
from textmill.generation.turns import Turns

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


class NewText(NamedTuple):
    """A text to generate."""

    request: Request
    max_new: int


class Scheduler(ModelThread[NewText]):
    """Generates the texts of up to `slots` requests at a time and queues up to `queue` more.

    Every accepted request gets exactly one Done, whatever happens. `after_step` is called in the scheduler's thread
    after each step's events.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        slots: int,
        queue: int,
        after_step: Callable[[], None] = lambda: None,
        turns: Turns | None = None,
    ) -> None:
        self.generator = generator
        self.tokenizer = generator.tokenizer
        self.vocab = generator.tokenizer.vocab
        self.positions = generator.positions
        self._batch: RunningBatch = generator.new_batch(slots)
        work = Generation(self._batch)
        super().__init__("textmill-scheduler", work, slots=slots, queue=queue, after_step=after_step, turns=turns)

    def submit(self, request: Request, deliver: DeliverEvent, deadline: float | None = None) -> int:
        """Queue a request and return its number.

        `deliver` is called in the scheduler's thread for every token, then once with Done. `deadline` is a
        `time.monotonic()` time. Raises QueueFull, or TextmillError if the request cannot be done.
        """
        max_new = max_new_tokens_served(request, self.positions, self.vocab)
        return self._enqueue(NewText(request, max_new), deliver, deadline)

    def warm_up(self) -> None:
        """Capture CUDA graphs and compile kernels before the first request; on a CPU there is nothing to do."""
        started = time.monotonic()
        if count := self._batch.slots.warm_up():
            sizes = {min(1 << power, self.slots) for power in range(self.slots.bit_length() + 1)}
            for sample, texts in product(WARM_UP_SAMPLES, sizes):
                for number in range(texts):
                    self._batch.add(number, Request((self.tokenizer.end,), sample), 2)
                while not self._batch.is_empty:
                    self._batch.step()
            warn(f"captured {count} decoding steps and prefills in {time.monotonic() - started:.1f} s")


class Generation:
    """The scheduler's work: a batch of texts that each get one more token in a step."""

    def __init__(self, batch: RunningBatch) -> None:
        self.batch = batch

    def count_joining(self, waiting: Sequence[Job[NewText]], active: int, now: float) -> int:
        """Return how many of the waiting texts join now.

        A prefill delays all running texts. So new texts wait for each other until their summed waiting time is as large
        as the summed delay, or one of them has waited long enough. With 20 running texts the delay is 20 x 1.5 ms: one
        text joins after 30 ms, three that came together join after 10 ms. Long prompts join one at a time.
        """
        waits = [now - job.queued_at for job in waiting]
        if sum(waits) < PREFILL_SECONDS * active and waits[0] < MAX_JOIN_WAIT:
            return 0
        tokens = 0
        for count, job in enumerate(waiting):
            tokens += len(job.item.request.ids)
            if count and tokens > PREFILL_TOKENS:
                return count
        return len(waiting)

    def add(self, number: int, item: NewText) -> None:
        """Let a text join at the next step."""
        self.batch.add(number, item.request, item.max_new)

    def step(self) -> list[tuple[int, Token | Done]]:
        """Generate one token for every text."""
        return self.batch.step()

    def drop(self, number: int, reason: FinishReason) -> Done | None:
        """End a text early."""
        return self.batch.drop(number, reason)

    def fail(self, message: str) -> dict[int, Done]:
        """End every text with an error."""
        return self.batch.fail(message)


def open_scheduler(
    checkpoint: Checkpoint,
    engine: EngineConfig,
    serve: ServeConfig,
    after_step: Callable[[], None] = lambda: None,
    turns: Turns | None = None,
) -> Scheduler:
    """Load a checkpoint and return a scheduler that is ready for requests; others may use the model in `turns`."""
    generator = open_generator(checkpoint, engine, separate_adapter=serve.adapter == "separate")
    scheduler = Scheduler(generator, slots=serve.slots, queue=serve.queue, after_step=after_step, turns=turns)
    scheduler.warm_up()
    return scheduler
