"""The models of a server, and the requests that they are answering.

A `Service` is a model with its limits and metrics. `ServedModels` are all of them: found by name, loaded when they are
first used, unloaded when memory is short. An `InFlightRequest` collects the texts of one HTTP request.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from textmill.config import SampleConfig, ServeConfig
from textmill.errors import TextmillError, warn
from textmill.generation.embed import TextEncoder
from textmill.generation.fill import MaskedTexts
from textmill.generation.requests import (
    Done,
    EncoderRequest,
    MemoryShort,
    ModelStats,
    QueueFull,
    Request,
    TextChunk,
    TokenLogprob,
)
from textmill.server.errors import HttpError, quote_value
from textmill.server.metrics import Metrics
from textmill.server.model_process import ModelProcess
from textmill.server.token_text import TokenTexts
from textmill.tokens.chat import AnyTemplate

MAX_CHOICES = 16
"""Most texts that one request may ask for: its prompts times `n`."""
MAX_INPUTS = 4096
"""Most texts in one request for embeddings or to fill in."""

IndexedChunk = tuple[int, TextChunk]
"""A text's index within its HTTP request, and its next chunk."""
RETRY_BROKEN_SECONDS = 5
"""When a client should try again if the model does not work."""
IDLE_SECONDS = 0.05
"""How often a model that is to be unloaded is checked for running requests."""
QUIET_SECONDS = 15.0
"""After this time without a chunk, the model is checked and a streaming client gets a keep-alive comment."""


@dataclass
class Service:
    """One served model."""

    model: ModelProcess
    config: ServeConfig
    sample: SampleConfig
    """Defaults for what a request leaves out."""
    name: str
    step: int = 0
    template: AnyTemplate | None = None
    load: Callable[[], Awaitable[None]] | None = None
    """Loads the model if it is not in memory; None: it always is."""
    generates: bool = True
    """Whether the model predicts the next token, so that it continues texts."""
    text_encoder: TextEncoder | None = None
    """How texts are encoded for embeddings, if the model has them."""
    masked_texts: MaskedTexts | None = None
    """How texts with masks are encoded, if the model predicts masked tokens."""
    stopping: bool = False
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    token_texts: TokenTexts = field(init=False)
    longest_text: float = field(init=False)
    """Upper bound of a prompt's characters: the longest token, as often as the context allows."""

    def __post_init__(self) -> None:
        self.token_texts = TokenTexts(self.model.tokenizer)
        inner = self.model.tokenizer.inner
        # With a normalizer there is no bound, because it may remove characters.
        longest = math.inf if inner.normalizer else max(map(len, inner.get_vocab()))
        self.longest_text = self.longest_prompt * longest

    @property
    def longest_prompt(self) -> int:
        """Tokens that a prompt may have: at most one less than the context."""
        return self.model.positions - 1

    def model_info(self) -> dict[str, Any]:
        """Return the model's entry in /v1/models."""
        sample = self.sample.model_dump(exclude={"prompt", "prompts_file", "count", "seed"})
        limits = {
            "max_tokens": self.config.max_tokens,
            "n": MAX_CHOICES,
            "prompt": self.longest_prompt,
            "inputs": MAX_INPUTS,
        }
        encoder = self.text_encoder
        embedding = None if encoder is None else {"dimensions": encoder.dimension, "tokens": encoder.longest}
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "textmill",
            "max_model_len": self.model.positions,
            "step": self.step,
            "vocab": self.model.vocab,
            "chat": self.template is not None,
            "language": self.token_texts.language,
            "sample": sample,
            "limits": limits,
            "generate": self.generates,
            "mask": None if self.masked_texts is None else self.masked_texts.mask,
            "embedding": embedding,
        }

    def problem(self) -> str:
        """Describe what is wrong with the model; empty if nothing is."""
        return self.model.problem(self.config.step_timeout)

    def retry_after(self) -> int:
        """Estimate the seconds until a refused client should try again."""
        return seconds_until_free(self.model.stats(), self.metrics)


class ServedModels:
    """The services of a server, one for each model; they share the first one's config and metrics.

    `key` is what a request must have. Preferred answers are written to the file `preferences`.
    """

    def __init__(self, services: Sequence[Service], key: str | None = None, preferences: Path | None = None) -> None:
        self._services = {service.name: service for service in services}
        self._first = services[0]
        self.config = services[0].config
        self.key = key
        self.preferences = preferences
        self.metrics = services[0].metrics
        self.stopping = False
        self._loading = asyncio.Lock()
        self._last_used: dict[str, float] = {}
        self._leaving: Service | None = None
        """The service whose model is being unloaded."""
        self._replaced: set[ModelProcess] = set()
        """Processes of earlier checkpoints that still answer requests."""
        if len(services) > 1:
            for service in services:
                service.load = partial(self._load, service)

    def find(self, name: str | None) -> Service:
        """Return the service that a request names; the first one if it names none."""
        service = self._first if name is None else self._services.get(name)
        if service is None:
            names = ", ".join(f"'{one}'" for one in self._services)
            message = f"model: unknown model {quote_value(name)}; this server has {names}"
            raise HttpError(404, message, field="model", code="model_not_found")
        return service

    def describe(self) -> list[dict[str, Any]]:
        """Return the entries of /v1/models."""
        return [service.model_info() for service in self._services.values()]

    def title(self) -> str:
        """Return the names of all models, and the first one's step."""
        step = f" at step {self._first.step:,}" if self._first.step else ""
        return ", ".join([f"{self._first.name}{step}", *list(self._services)[1:]])

    def problem(self) -> str:
        """Describe what is wrong with a model; empty if nothing is."""
        problems = {service.name: service.problem() for service in self._services.values()}
        name, problem = next(((name, text) for name, text in problems.items() if text), ("", ""))
        return f"{name}: {problem}" if problem and len(problems) > 1 else problem

    def stats(self) -> ModelStats:
        """Return the counts of all models together."""
        stats = [service.model.stats() for service in self._services.values()]
        return ModelStats(*map(sum, zip(*map(astuple, stats), strict=True)))

    def steps(self) -> dict[str, int]:
        """Return the steps of the models that are loaded, by name."""
        return {service.name: service.step for service in self._services.values() if service.model.loaded}

    async def connect(self) -> None:
        """Connect to the process of the first model, which has been started."""
        await self._first.model.connect()

    async def close(self, grace: float) -> None:
        """Accept nothing more; let requests finish for `grace` seconds. A second call may shorten the grace."""
        self.stopping = True
        for service in self._services.values():
            service.stopping = True
        models = [*self._replaced, *(service.model for service in self._services.values())]
        await asyncio.gather(*(model.close(grace) for model in models))

    async def replace(self, service: Service, newer: Service) -> None:
        """Let a newer checkpoint answer new requests; the older one answers those that it has, and is closed."""
        async with self._loading:
            older = service.model
            if older.loaded:
                await newer.model.load()
            service.model = newer.model
            service.step = newer.step
            self._replaced.add(older)
        warn(f"{service.name}: step {service.step:,} answers from here on")
        try:
            await older.close(service.config.request_timeout)
        finally:
            self._replaced.discard(older)

    async def _load(self, service: Service) -> None:
        """Load the model of a service if it is not in memory; if there is no space, unload the one unused longest."""
        self._last_used[service.name] = time.monotonic()
        if service.model.loaded and service is not self._leaving:
            return
        async with self._loading:
            while not service.model.loaded and not self.stopping:
                loaded = [one for one in self._services.values() if one.model.loaded]
                if self.config.loaded_models is not None and len(loaded) >= self.config.loaded_models:
                    await self._unload_oldest(loaded)
                    continue
                try:
                    await service.model.load()
                except MemoryShort as error:
                    if not loaded:
                        raise broken_model_error(f"'{service.name}' cannot be loaded: {error}") from None
                    await self._unload_oldest(loaded)
                except TextmillError as error:
                    reason = str(error) or "see the server's log"
                    raise broken_model_error(f"'{service.name}' cannot be loaded: {reason}") from None
                else:
                    warn(f"loaded {service.name}")

    async def _unload_oldest(self, loaded: Sequence[Service]) -> None:
        """Unload the model that was not used for the longest time, once its requests have ended."""
        oldest = min(loaded, key=lambda service: self._last_used.get(service.name, 0.0))
        self._leaving = oldest
        try:
            while (stats := oldest.model.stats()).active or stats.waiting:
                await asyncio.sleep(IDLE_SECONDS)
            await oldest.model.unload()
            warn(f"unloaded {oldest.name}, to make space")
        finally:
            self._leaving = None


def seconds_until_free(stats: ModelStats, metrics: Metrics) -> int:
    """Estimate how long a queue lasts, from its length and recent request times."""
    rounds = (stats.waiting + stats.active) / max(stats.slots, 1)
    return max(1, min(60, math.ceil(rounds * metrics.mean_seconds())))


@dataclass
class ReceivedText:
    """What has arrived of one text, and how it ended."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    done: Done | None = None

    def add(self, chunk: TextChunk) -> None:
        """Append a chunk."""
        self.text += chunk.text
        self.logprobs += chunk.logprobs
        self.done = chunk.done


class InFlightRequest:
    """The texts of one HTTP request, submitted together, from the model's queue to the reply."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._model = service.model
        self._received: list[IndexedChunk] = []
        self._changed = asyncio.Event()
        """Set when a chunk has arrived, or the client has left."""
        self._disconnected = False
        self._ended = 0
        """Texts that have ended."""
        self.numbers: list[int] = []
        """The model's number of each text."""
        self.started = time.monotonic()

    @property
    def complete(self) -> bool:
        """Whether all texts have ended."""
        return self._ended == len(self.numbers)

    def submit(self, requests: Sequence[Request | EncoderRequest], seconds: float, streamed: bool) -> None:
        """Queue all texts, or none of them."""
        deadline = self.started + seconds
        try:
            for index, request in enumerate(requests):
                deliver = partial(self._receive, index)
                self.numbers.append(self._model.submit(request, deliver, deadline, streamed))
        except BaseException:
            self.cancel()
            raise

    def _receive(self, index: int, chunk: TextChunk) -> None:
        self._received.append((index, chunk))
        self._changed.set()

    def on_disconnect(self, _: object = None) -> None:
        """Stop `chunks`, because the client is gone."""
        self._disconnected = True
        self._changed.set()

    async def chunks(self) -> AsyncIterator[list[IndexedChunk]]:
        """Yield new chunks until every text has ended; yield an empty list after a quiet time.

        Ends early if the client disconnects; raises HttpError if the model is broken.
        """
        quiet_seconds = min(QUIET_SECONDS, self.service.config.step_timeout)
        while not self.complete:
            with suppress(TimeoutError):
                async with asyncio.timeout(quiet_seconds):
                    await self._changed.wait()
            self._changed.clear()
            if self._disconnected:
                return
            received = self._received
            self._received = []
            if not received and (problem := self._model.problem(self.service.config.step_timeout)):
                raise broken_model_error(problem)
            self._ended += sum(chunk.done is not None for _, chunk in received)
            yield received

    def cancel(self) -> None:
        """Cancel all texts at the model's next step."""
        for number in self.numbers:
            self._model.cancel(number)

    def seconds(self) -> float:
        """Return the time since the request started."""
        return time.monotonic() - self.started


async def start_request(
    service: Service, requests: Sequence[Request | EncoderRequest], *, streamed: bool
) -> InFlightRequest:
    """Load the model if necessary and submit the texts of a request.

    Raises HttpError if the queue is full, the server stops or a text is invalid.
    """
    if service.stopping:
        raise stopping_error()
    if problem := service.problem():
        raise broken_model_error(problem)
    if service.load is not None:
        await service.load()  # from here to `submit` nothing else runs, so it stays loaded
    in_flight = InFlightRequest(service)
    try:
        in_flight.submit(requests, service.config.request_timeout, streamed)
    except QueueFull:
        raise (
            stopping_error() if service.stopping else queue_full_error(service.model.stats(), service.metrics)
        ) from None
    except TextmillError as error:
        if problem := service.problem():  # it may have broken a moment ago
            raise broken_model_error(problem) from None
        raise (stopping_error() if service.stopping else HttpError(400, str(error))) from None
    return in_flight


def queue_full_error(stats: ModelStats, metrics: Metrics) -> HttpError:
    """Count and return the error of a full server."""
    metrics.refused += 1
    wait = seconds_until_free(stats, metrics)
    return HttpError(429, f"the server's queue is full; try again in {wait} s", code="queue_full", retry_after=wait)


def stopping_error() -> HttpError:
    """Return the error of a stopping server."""
    return HttpError(503, "the server is stopping; try another one, or later", code="stopping", retry_after=10)


def broken_model_error(problem: str) -> HttpError:
    """Return the error of a server whose model does not work; it may recover, or be restarted."""
    return HttpError(503, problem, code="model_broken", retry_after=RETRY_BROKEN_SECONDS)


async def wait_for_texts(http: HttpRequest, in_flight: InFlightRequest) -> list[ReceivedText]:
    """Return the complete texts; cancel them if the client disconnects."""
    texts = [ReceivedText() for _ in in_flight.numbers]
    disconnect = asyncio.create_task(wait_for_disconnect(http.receive))
    disconnect.add_done_callback(in_flight.on_disconnect)
    try:
        async for received in in_flight.chunks():
            for index, chunk in received:
                texts[index].add(chunk)
        if not in_flight.complete:
            in_flight.service.metrics.disconnects += 1
            raise HttpError(499, "the client disconnected", code="client_left")
    finally:
        disconnect.cancel()
        if not in_flight.complete:
            in_flight.cancel()
    _raise_failed(in_flight.service, texts)
    return texts


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _raise_failed(service: Service, texts: list[ReceivedText]) -> None:
    """Raise HttpError for errors of the model, texts that a shutdown ended, and texts without a token in time."""
    for text in texts:
        assert text.done is not None
        if text.done.reason == "error":
            raise HttpError(500, text.done.message or "the model failed; see the server's log", code="model_error")
        if text.done.reason == "timeout":
            service.metrics.timeouts += 1
        if text.done.reason == "cancelled":
            raise stopping_error()
        if not text.done.tokens and text.done.reason == "timeout":
            wait = service.retry_after()
            message = f"no token within the time limit of {service.config.request_timeout:g} s; try again in {wait} s"
            raise HttpError(429, message, code="timeout", retry_after=wait)


def merge_chunks(received: Sequence[IndexedChunk]) -> Iterator[tuple[int, ReceivedText]]:
    """Merge the chunks of each text; yield its index and new text, in the order of first appearance."""
    merged: dict[int, ReceivedText] = {}
    for index, chunk in received:
        merged.setdefault(index, ReceivedText()).add(chunk)
    yield from merged.items()
