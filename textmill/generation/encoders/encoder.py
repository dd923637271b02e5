"""Answers embedding and fill requests: one thread runs the model for the texts of many requests at a time."""

from __future__ import annotations

import base64
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError, warn
from textmill.generation.encoders.embedder_torch import Embedder
from textmill.generation.encoders.filler_torch import Filler
from textmill.generation.requests import (
    Done,
    EmbedRequest,
    EncoderRequest,
    FillRequest,
    FinishReason,
    QueueFull,
    describe_problem,
)
from textmill.generation.text_chunks import DeliverChunk, TextChunk
from textmill.generation.turns import Turns

STEP_TOKENS = {"cpu": 512, "cuda": 1 << 15}
"""Tokens of all requests that are computed in one step. Texts that are generated wait for it, and cancelled requests
end after it."""
CLOSE_SECONDS = 5.0
"""How long `close` waits for a step that does not end."""


@dataclass
class Job:
    """A request that was accepted, and what is found so far."""

    number: int
    request: EncoderRequest
    deliver: DeliverChunk
    deadline: float
    left: list[int] = field(default_factory=list)
    """The texts that are not computed yet."""
    vectors: NDArray[np.float32] | None = None
    filled: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    end_reason: FinishReason | None = None


class Encoder:
    """Runs up to `slots` requests at a time and queues `queue` more; texts of different requests share a step.

    Every accepted request gets exactly one chunk with Done. Its text is the result: JSON for masks, and for embeddings
    float32 numbers in base64. `after_step` is called in the encoder's thread after the results of each step.
    """

    def __init__(
        self, embedder: Embedder, filler: Filler | None, *, slots: int, queue: int, turns: Turns | None = None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.embedder, self.filler, self.slots, self.queue = embedder, filler, slots, queue
        self.tokenizer, self.positions = embedder.texts.tokenizer, int(embedder.net.shape.positions)
        self.vocab = self.tokenizer.vocab
        self._turns, self._after_step = turns or Turns(), after_step
        self._changed = threading.Condition()
        self._jobs: list[Job] = []
        self._close_at: float | None = None
        self._requests = self._cancelled = self._failed_steps = 0
        self._step_started: float | None = None
        self._thread = threading.Thread(target=self._run, name="textmill-encoder", daemon=True)
        self._thread.start()

    def submit(
        self, request: EncoderRequest, deliver: DeliverChunk, deadline: float | None = None, streamed: bool = False
    ) -> int:
        """Queue a request and return its number; raises QueueFull, or TextmillError if it cannot be done."""
        if isinstance(request, FillRequest) and self.filler is None:
            raise TextmillError("the model has no head for masked tokens, so it cannot fill them in")
        with self._changed:
            if self._close_at is not None:
                raise TextmillError("the server is closing; send the request again when it is back")
            if len(self._jobs) >= self.slots + self.queue:
                raise QueueFull
            self._requests += 1
            job = Job(self._requests, request, deliver, math.inf if deadline is None else deadline)
            job.left = _order(request)
            if isinstance(request, EmbedRequest):
                job.vectors = np.zeros((len(request.ids), self.embedder.texts.dimension), np.float32)
            self._jobs.append(job)
            self._changed.notify()
            return job.number

    def cancel(self, number: int) -> None:
        """End a request before the next step; nothing happens if it has ended already."""
        with self._changed:
            for job in self._jobs:
                if job.number == number:
                    job.end_reason = "cancelled"
            self._changed.notify()

    def stats(self) -> dict[str, int | float]:
        """Return the counts for /metrics."""
        with self._changed:
            active = min(len(self._jobs), self.slots)
            return {
                "active": active, "waiting": len(self._jobs) - active, "slots": self.slots, "queue": self.queue,
                "tokens": 0, "requests": self._requests, "cancelled": self._cancelled,
            }  # fmt: skip

    def problem(self, max_step_seconds: float) -> str:
        """Describe what is wrong with the model; empty if nothing is."""
        if self._close_at is not None:
            return ""
        alive, seconds = self._thread.is_alive(), self.step_seconds()
        return describe_problem(alive, seconds, max_step_seconds, self._failed_steps)

    def step_seconds(self) -> float:
        """Return how long the current step has taken; 0 between steps."""
        started = self._step_started
        return 0.0 if started is None else time.monotonic() - started

    def close(self, grace: float) -> None:
        """Accept nothing more; let accepted requests finish for `grace` seconds, then cancel them."""
        with self._changed:
            self._close_at = time.monotonic() + grace
            self._changed.notify()
        self._thread.join(grace + CLOSE_SECONDS)

    def _run(self) -> None:
        """Work until closed. If this thread fails, every request ends with an error."""
        try:
            self._work()
        except BaseException as error:
            warn(f"the model's thread has died ({type(error).__name__}: {error}); restart the server")
            for job in list(self._jobs):
                self._end(job, Done("error", 0, "", "the model's thread has died; restart the server"))
            self._after_step()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs and self._close_at is None:
                    self._changed.wait()
                if not self._jobs:
                    return
                jobs = self._jobs[: self.slots]
            ended = self._end_early()
            if running := [job for job in jobs if job not in ended]:
                self._step(running)
            self._after_step()

    def _end_early(self) -> list[Job]:
        """End jobs that were cancelled or timed out, and all jobs once the grace is over."""
        now, ended = time.monotonic(), []
        for job in list(self._jobs):
            over = self._close_at is not None and now >= self._close_at
            reason = job.end_reason or ("timeout" if now >= job.deadline else "cancelled" if over else None)
            if reason is not None:
                self._cancelled += reason == "cancelled"
                self._end(job, Done(reason, 0, ""))
                ended.append(job)
        return ended

    def _step(self, jobs: list[Job]) -> None:
        """Compute some texts of each job, equally many tokens; end the jobs that are complete."""
        self._step_started = time.monotonic()
        try:
            with self._turns:
                self._compute(jobs)
        except Exception as error:
            self._failed_steps += 1
            message = str(error) if isinstance(error, TextmillError) else f"the model failed: {type(error).__name__}"
            warn(f"{type(error).__name__}: {error}")
            for job in jobs:
                self._end(job, Done("error", 0, "", message))
        else:
            self._failed_steps = 0
            for job in jobs:
                if not job.left:
                    self._end(job, Done("stop", job.tokens, ""), _result(job))
        finally:
            self._step_started = None

    def _compute(self, jobs: list[Job]) -> None:
        share = max(1, STEP_TOKENS.get(self.embedder.net.head.device.type, STEP_TOKENS["cpu"]) // len(jobs))
        texts: list[tuple[Job, int]] = []
        for job in jobs:
            if isinstance(job.request, FillRequest):
                self._fill(job, job.request, share)
            else:
                texts += [(job, number) for number in _take(job, job.request.ids.__getitem__, share)]
        ids = [np.array(job.request.ids[number]) for job, number in texts if isinstance(job.request, EmbedRequest)]
        for (job, number), vector in zip(texts, self.embedder.embed_ids(ids), strict=True):
            assert job.vectors is not None
            job.vectors[number] = vector

    def _fill(self, job: Job, request: FillRequest, tokens: int) -> None:
        """Fill the next texts of a job with about this many tokens."""
        assert self.filler is not None
        texts, prompts = self.filler.texts, request.prompts
        taken = _take(job, lambda number: texts.encode(prompts[number]), tokens)
        filled = self.filler.fill([prompts[number] for number in taken], request.choices)
        job.filled += [asdict(one) for one in filled]

    def _end(self, job: Job, done: Done, text: str = "") -> None:
        with self._changed:
            self._jobs.remove(job)
        try:
            job.deliver(TextChunk(text, done=done))
        except Exception as error:
            warn(f"request {job.number}: delivering its result failed ({type(error).__name__})")


def _order(request: EncoderRequest) -> list[int]:
    """The numbers of a request's texts in the order of computation, last one first: long texts, or as given."""
    if isinstance(request, FillRequest):
        return list(reversed(range(len(request.prompts))))
    return sorted(range(len(request.ids)), key=lambda number: len(request.ids[number]))


def _take(job: Job, ids_of: Callable[[int], Sequence[int]], tokens: int) -> list[int]:
    """The next texts of a job with about this many tokens, at least one text."""
    taken: list[int] = []
    while job.left and tokens > 0:
        taken.append(job.left.pop())
        length = len(ids_of(taken[-1]))
        tokens -= length
        job.tokens += length
    return taken


def _result(job: Job) -> str:
    if job.vectors is None:
        return json.dumps(job.filled, ensure_ascii=False)
    return base64.b64encode(job.vectors.astype("<f4", copy=False).tobytes()).decode()
