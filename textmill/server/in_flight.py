"""InFlightRequest: the texts of one HTTP request on their way through the scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from fastapi import Request as HttpRequest
from starlette.types import Receive

from textmill.errors import TextmillError
from textmill.generation.requests import Done, QueueFull, Request
from textmill.generation.text_chunks import TextChunk, TokenLogprob
from textmill.server.error_replies import HttpError
from textmill.server.service import Service

Event = tuple[int, TextChunk]
"""A text's place among those of its request, and what has come of it."""
QUIET = 15.0
"""Seconds without an event after which the model is looked at, and a streaming client is told that the line still lives."""


@dataclass
class Text:
    """One text: what was made of it so far, and how it ended."""

    text: str = ""
    entries: list[TokenLogprob] = field(default_factory=list)
    done: Done | None = None

    def add(self, part: TextChunk) -> None:
        """Take in what the scheduler delivered."""
        self.text += part.text
        self.entries += part.logprobs
        self.done = part.done


class InFlightRequest:
    """Texts that were submitted together."""

    def __init__(self, service: Service) -> None:
        self._service, self._scheduler, self._mail = service, service.scheduler, service.mail
        self._loop = asyncio.get_running_loop()
        self._events: list[Event] = []
        self._waiting: asyncio.Future[None] | None = None
        self.numbers: list[int] = []
        self.begun = self._last = time.monotonic()
        self._quiet = self.left = False
        self.ended = 0

    def submit(self, requests: Sequence[Request], seconds: float, streamed: bool) -> None:
        """Queue every text, or none of them."""
        deadline = self.begun + seconds
        try:
            for place, request in enumerate(requests):
                deliver = partial(self._mail.put, self._loop, partial(self._take, place))
                self.numbers.append(self._scheduler.submit(request, deliver, deadline, streamed))
        except BaseException:
            self.cancel()
            raise

    def _take(self, place: int, part: TextChunk) -> None:
        self._events.append((place, part))
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def events(self) -> AsyncIterator[list[Event]]:
        """What has come, as often as something has, until every text is done; nothing for a while is an empty list.

        Nobody waits for a model that is broken: that is a refusal. Nor is there anything for a client that has left.
        """
        self._look_again()
        try:
            while self.ended < len(self.numbers):
                if not self._events and not self._quiet and not self.left:
                    self._waiting = self._loop.create_future()
                    await self._waiting
                if self.left:
                    return
                come, self._events = self._events, []
                quiet, self._quiet = self._quiet, False
                self.ended += sum(part.done is not None for _, part in come)
                if come:
                    self._last = time.monotonic()
                elif quiet and (problem := self._service.problem()):
                    raise broken_model_error(problem)
                if come or quiet:
                    yield come
        finally:
            self._timer.cancel()

    def _look_again(self) -> None:
        """Wake who waits when nothing has come for a while; one timer now and then, not one an event."""
        most, silent = min(QUIET, self._service.config.step_timeout), time.monotonic() - self._last
        if silent >= most:
            self._quiet, self._last, silent = True, time.monotonic(), 0.0
            self._wake()
        self._timer = self._loop.call_later(most - silent, self._look_again)

    def leave(self, _: object = None) -> None:
        """The client has gone: its events are over."""
        self.left = True
        self._wake()

    def cancel(self) -> None:
        """End what still runs, at the model's next step."""
        for number in self.numbers:
            self._scheduler.cancel(number)

    def seconds(self) -> float:
        """How long it has taken until now."""
        return time.monotonic() - self.begun


def start(service: Service, requests: Sequence[Request], *, streamed: bool) -> InFlightRequest:
    """Submit the texts of a request; a full queue, a stopping server or an impossible wish is refused."""
    if service.stopping:
        raise stopping_error()
    if problem := service.problem():
        raise broken_model_error(problem)
    flight = InFlightRequest(service)
    try:
        flight.submit(requests, service.config.request_timeout, streamed)
    except QueueFull:
        raise (stopping_error() if service.stopping else queue_full_error(service)) from None
    except TextmillError as error:
        if problem := service.problem():  # since a moment ago
            raise broken_model_error(problem) from None
        raise (stopping_error() if service.stopping else HttpError(400, str(error))) from None
    return flight


def queue_full_error(service: Service) -> HttpError:
    """What a full server says."""
    service.metrics.refused += 1
    wait = service.wait_of()
    return HttpError(429, f"the server is full; try again in {wait} s", code="queue_full", retry_after=wait)


def stopping_error() -> HttpError:
    """What a stopping server says."""
    return HttpError(503, "the server is stopping; ask another, or again later", code="stopping", retry_after=10)


def broken_model_error(problem: str) -> HttpError:
    """What a server says whose model does not work."""
    return HttpError(503, problem, code="model_broken")


async def finish(service: Service, http: HttpRequest, flight: InFlightRequest) -> list[Text]:
    """The whole texts; a client that leaves before ends them."""
    texts = [Text() for _ in flight.numbers]
    gone = asyncio.create_task(left(http.receive))
    gone.add_done_callback(flight.leave)
    try:
        async for come in flight.events():
            for place, part in come:
                texts[place].add(part)
        if flight.ended < len(flight.numbers):
            service.metrics.left += 1
            raise HttpError(499, "the client left", code="client_left")
    finally:
        gone.cancel()
        if flight.ended < len(flight.numbers):
            flight.cancel()
    _refuse_ended(service, texts)
    return texts


async def left(receive: Receive) -> None:
    """Waits until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _refuse_ended(service: Service, texts: list[Text]) -> None:
    """Errors of the model, and texts that ended before they began."""
    for text in texts:
        assert text.done is not None
        if text.done.reason == "error":
            raise HttpError(500, text.done.message or "the model failed; the server's log says how", code="model_error")
        if text.done.reason == "timeout":
            service.metrics.timeouts += 1
        if not text.done.tokens and text.done.reason == "cancelled":
            raise stopping_error()
        if not text.done.tokens and text.done.reason == "timeout":
            wait = service.wait_of()
            told = f"no token came within the {service.config.request_timeout:g} s that a request may take; try again in {wait} s"
            raise HttpError(429, told, code="timeout", retry_after=wait)


def texts_of(come: Sequence[Event]) -> Iterator[tuple[int, Text]]:
    """What has come, as one text for each place that anything came for, in the order of their first."""
    found: dict[int, Text] = {}
    for place, part in come:
        found.setdefault(place, Text()).add(part)
    yield from found.items()
