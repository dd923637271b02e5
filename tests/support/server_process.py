"""A server with an echo model or a real one, run as `python -m tests.support.server_process JSON`."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.small_models import TEXT
from textmill.checkpoints.folders import Checkpoint, open_checkpoint
from textmill.config import EmbedConfig, EngineConfig, SampleConfig, ServeConfig, TokenizerConfig, TorchEngine
from textmill.errors import TextmillError
from textmill.generation.requests import DeliverChunk, Done, ModelStats, QueueFull, Request, TextChunk, Token
from textmill.generation.worker import ChunkCollector
from textmill.models import read_shape
from textmill.server import lifecycle
from textmill.server.lifecycle import bind, open_service, read_api_key, run
from textmill.server.model_process import new_model_process
from textmill.server.service import ServedModels, Service
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit, open_tokenizer
from textmill.where import open_where


class TextDecoder:
    """Decodes ids one by one; returns a character when all its bytes are known."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer, self.held = tokenizer, list[int]()

    def add(self, id_: int) -> str:
        self.held.append(id_)
        text = self.tokenizer.decode(self.held)
        return "" if text.endswith("�") else self.end()

    def end(self) -> str:
        text, self.held = self.tokenizer.decode(self.held), []
        return text


@dataclass
class Job:
    """A running or waiting request."""

    number: int
    request: Request
    deliver: Callable[[Token | Done], None]
    deadline: float | None
    text: TextDecoder
    cancelled: bool = False
    made: int = 0
    held: str = field(default="")


class Echo:
    """A model that repeats the tokens of the prompt, one per slot every `delay` seconds.

    While the file `paused` exists, it generates none.
    """

    def __init__(self, tokenizer: TextTokenizer, slots: int, queue: int, delay: float, paused: str = "") -> None:
        self.tokenizer, self.positions = tokenizer, 512
        self.slots, self.queue, self.delay, self.paused = slots, queue, delay, paused
        self.waiting: deque[Job] = deque()
        self.active: list[Job] = []
        self.counts = {"tokens": 0, "requests": 0, "cancelled": 0}
        self.numbers, self.lock, self.closing = itertools.count(1), threading.Lock(), False
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, request: Request, deliver: Callable[[Token | Done], None], deadline: float | None = None) -> int:
        with self.lock:
            if self.closing or len(self.active) + len(self.waiting) >= self.slots + self.queue:
                raise QueueFull
            if len(request.ids) >= self.positions:
                raise TextmillError("the prompt is too long")
            job = Job(next(self.numbers), request, deliver, deadline, TextDecoder(self.tokenizer))
            self.waiting.append(job)
            self.counts["requests"] += 1
            return job.number

    def cancel(self, number: int) -> None:
        with self.lock:
            for job in [*self.active, *self.waiting]:
                job.cancelled = job.cancelled or job.number == number

    def stats(self) -> ModelStats:
        with self.lock:
            return ModelStats(len(self.active), len(self.waiting), self.slots, self.queue, **self.counts)

    def problem(self, patience: float) -> str:
        return ""

    def close(self, grace: float) -> None:
        end = time.monotonic() + grace
        with self.lock:
            self.closing = True
        while time.monotonic() < end and (self.active or self.waiting):
            time.sleep(0.01)
        with self.lock:
            for job in [*self.active, *self.waiting]:
                job.cancelled = True
        while self.active or self.waiting:
            time.sleep(0.01)

    def _work(self) -> None:
        while True:
            time.sleep(self.delay)
            with self.lock:
                while self.waiting and len(self.active) < self.slots:
                    self.active.append(self.waiting.popleft())
                ended = [(job, done) for job in self.active if (done := self._step(job))]
                ended += [(job, Done("cancelled", 0, "")) for job in self.waiting if job.cancelled]
                gone = {job.number for job, _ in ended}
                self.active = [job for job in self.active if job.number not in gone]
                self.waiting = deque(job for job in self.waiting if job.number not in gone)
                self.counts["cancelled"] += sum(done.reason == "cancelled" for _, done in ended)
            for job, done in ended:
                job.deliver(done)

    def _step(self, job: Job) -> Done | None:
        request = job.request
        prompt_logprobs = (
            tuple((None if place == 0 else -1.0, ((id_, -1.0),)) for place, id_ in enumerate(request.ids))
            if request.echo
            else ()
        )
        if job.cancelled or (job.deadline is not None and time.monotonic() > job.deadline):
            return Done(
                "cancelled" if job.cancelled else "timeout", job.made, job.text.end(), prompt_logprobs=prompt_logprobs
            )
        if job.made >= request.sample.max_tokens:
            return Done("length", job.made, job.text.end(), prompt_logprobs=prompt_logprobs)
        if os.path.exists(self.paused):
            return None
        id_ = request.ids[job.made % len(request.ids)]
        job.made += 1
        self.counts["tokens"] += 1
        piece = job.text.add(id_)
        logprobs = (math.log(0.5), ((id_, math.log(0.5)), (0, math.log(0.25)))) if request.logprobs else (None, ())
        if any(stop in piece for stop in request.stop):
            job.deliver(Token(id_, "", *logprobs))
            return Done("stop", job.made, "", prompt_logprobs=prompt_logprobs)
        job.deliver(Token(id_, piece, *logprobs))
        return None


class Turns:
    """A chat template: each turn is a line with its role."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer, self.jinja = (
            tokenizer,
            "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}",
        )
        self.stop_ids = ()

    def render(
        self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        lines = "".join(f"{turn['role']}: {turn['content']}\n" for turn in messages)
        return self.tokenizer.encode(lines + ("assistant:" if add_generation_prompt else ""))


class InProcess:
    """A model in this process in place of a ModelProcess: delivers the tokens of `inner` in chunks."""

    loaded = True

    def __init__(self, inner: Any, tokenizer: TextTokenizer, positions: int) -> None:
        self.inner = inner
        self.vocab, self.positions, self.tokenizer = tokenizer.vocab, positions, tokenizer
        self.cancel, self.stats, self.problem = inner.cancel, inner.stats, inner.problem

    def start(self) -> None:
        pass

    async def connect(self) -> None:
        pass

    async def close(self, grace: float) -> None:
        await asyncio.to_thread(self.inner.close, grace)

    def submit(
        self, request: Request, deliver: DeliverChunk, deadline: float | None = None, streamed: bool = False
    ) -> int:
        loop = asyncio.get_running_loop()

        def deliver_in_loop(chunk: TextChunk) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(deliver, chunk)

        collector = ChunkCollector(deliver_in_loop, bool(request.logprobs), streamed)
        number: int = self.inner.submit(request, collector, deadline)
        return number


def in_process(checkpoint: Checkpoint, engine: EngineConfig, serve: ServeConfig, embed: EmbedConfig) -> Any:
    """Open the model in this process, so that a test can reach it; in place of `new_model_process`."""
    from textmill.generation.scheduler import open_scheduler

    positions = read_shape(checkpoint.folder).positions
    return InProcess(open_scheduler(checkpoint, engine, serve, embed), open_tokenizer(checkpoint.tokenizer), positions)


def new_service(options: dict[str, Any]) -> Service:
    """Return the service that a test needs: `where` names any model, `model` a checkpoint; default: the echo model."""
    if where := options.get("where"):
        settings = ["engine.device=cpu", "engine.precision=fp32", *options.get("settings", [])]
        service = open_service(open_where(where, settings).config)
        service.model.start()
        return service
    serve = ServeConfig(port=0, **options.get("serve", {}))
    sample = SampleConfig(**options.get("sample", {}))
    if folder := options.get("model"):
        model: Any = new_model_process(
            open_checkpoint(Path(folder)), TorchEngine(device="cpu", precision="fp32"), serve, EmbedConfig()
        )
        model.start()
    else:
        tokenizer = fit(iter([TEXT * 3]), TokenizerConfig(vocab=300))
        echo = Echo(tokenizer, serve.slots, serve.queue, options.get("delay", 0.001), options.get("paused", ""))
        model = InProcess(echo, tokenizer, echo.positions)
    template = Turns(model.tokenizer) if options.get("chat", True) else None
    return Service(model, serve, sample, serve.model_name or "mill", 7, template)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    for name, value in given.get("limits", {}).items():
        setattr(lifecycle, name, value)
    service = new_service(given)
    preferences = Path(given["preferences"]) if "preferences" in given else None
    run(ServedModels([service], read_api_key(service.config), preferences), bind("127.0.0.1", 0))
