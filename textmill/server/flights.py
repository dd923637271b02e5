"""Flight: the texts of one HTTP request on their way through the scheduler, which runs on a thread of its own."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fastapi import Request as HttpRequest
from starlette.types import Receive

from textmill.errors import TextmillError
from textmill.generation.requests import Done, Request, Token
from textmill.server.refusals import Refusal
from textmill.server.service import Service

Event = tuple[int, Token | Done]
OFTEN = 0.02
"""Seconds between two looks at a text that is streamed: faster than eyes, and a model that makes thousands of tokens a second needs the
interpreter for itself."""
QUIET = 15.0
"""Seconds without an event after which the model is looked at, and a streaming client is told that the line still lives."""


@dataclass
class Text:
    """One text: what was made of it so far, and how it ended."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    done: Done | None = None

    def add(self, event: Token | Done) -> None:
        """Take in what the scheduler delivered."""
        self.text += event.text
        if isinstance(event, Done):
            self.done = event
        else:
            self.tokens.append(event)


class Flight:
    """Texts that were submitted together; the loop is woken once for whatever has come, not once a token."""

    def __init__(self, service: Service, streamed: bool) -> None:
        self._service, self._scheduler, self._streamed = service, service.scheduler, streamed
        self._loop = asyncio.get_running_loop()
        self._come, self._woken, self._events = asyncio.Event(), False, deque[Event]()
        self.numbers: list[int] = []
        self.begun = time.monotonic()
        self.looked = 0.0
        self.ended = 0

    def submit(self, requests: Sequence[Request], seconds: float) -> None:
        """Queue every text, or none of them."""
        deadline = self.begun + seconds
        try:
            for place, request in enumerate(requests):
                self.numbers.append(self._scheduler.submit(request, self._deliver(place), deadline))
        except BaseException:
            self.cancel()
            raise

    def _deliver(self, place: int) -> Callable[[Token | Done], None]:
        def deliver(event: Token | Done) -> None:
            # On the scheduler's thread: first the event, then the flag, as the loop reads them the other way round.
            self._events.append((place, event))
            if not self._woken and (self._streamed or isinstance(event, Done)):
                self._woken = True
                try:
                    self._loop.call_soon_threadsafe(self._wake)
                except RuntimeError:
                    return  # the loop is closed: nobody waits any more

        return deliver

    def _wake(self) -> None:
        """Look at what has come, now or a little later if the last look was just before."""
        soon = self.looked + OFTEN - time.monotonic()
        if soon > 0:
            self._loop.call_later(soon, self._come.set)
        else:
            self._come.set()

    async def events(self) -> AsyncIterator[list[Event]]:
        """What has come, as often as something has, until every text is done; nothing for a while is an empty list.

        Nobody waits for a model that is broken: that is a refusal.
        """
        quiet = min(QUIET, self._service.config.patience)
        while self.ended < len(self.numbers):
            try:
                await asyncio.wait_for(self._come.wait(), quiet)
            except TimeoutError:
                if trouble := self._service.trouble():
                    raise broken_refusal(trouble) from None
                yield []
                continue
            self._come.clear()
            self._woken, self.looked = False, time.monotonic()
            come = []
            while self._events:
                come.append(self._events.popleft())
            self.ended += sum(isinstance(event, Done) for _, event in come)
            if come:
                yield come

    def cancel(self) -> None:
        """End what still runs, at the model's next step."""
        for number in self.numbers:
            self._scheduler.cancel(number)

    def seconds(self) -> float:
        """How long it has taken until now."""
        return time.monotonic() - self.begun


def start(service: Service, requests: Sequence[Request], *, streamed: bool) -> Flight:
    """Submit the texts of a request; a full queue, a stopping server or an impossible wish is refused."""
    from textmill.generation.scheduler import Full  # with the model's framework, which only a running server needs

    if service.stopping:
        raise stopping_refusal()
    if trouble := service.trouble():
        raise broken_refusal(trouble)
    flight = Flight(service, streamed)
    try:
        flight.submit(requests, service.config.seconds)
    except Full:
        raise (stopping_refusal() if service.stopping else full_refusal(service)) from None
    except TextmillError as error:
        raise (stopping_refusal() if service.stopping else Refusal(400, str(error))) from None
    return flight


def full_refusal(service: Service) -> Refusal:
    """What a full server says."""
    service.metrics.refused += 1
    wait = service.wait_of()
    return Refusal(429, f"the server is full; try again in {wait} s", code="queue_full", retry_after=wait)


def stopping_refusal() -> Refusal:
    """What a stopping server says."""
    return Refusal(503, "the server is stopping; ask another, or again later", code="stopping", retry_after=10)


def broken_refusal(trouble: str) -> Refusal:
    """What a server says whose model does not work."""
    return Refusal(503, trouble, code="model_broken")


async def finish(service: Service, http: HttpRequest, flight: Flight) -> list[Text]:
    """The whole texts; a client that leaves before ends them."""
    texts = [Text() for _ in flight.numbers]

    async def gather() -> None:
        async for come in flight.events():
            for place, event in come:
                texts[place].add(event)

    made, gone = asyncio.ensure_future(gather()), asyncio.ensure_future(left(http.receive))
    try:
        await asyncio.wait({made, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not made.done():
            service.metrics.left += 1
            raise Refusal(499, "the client left", code="client_left")
        made.result()
    finally:
        made.cancel()
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
            raise Refusal(500, text.done.message or "the model failed; the server's log says how", code="model_error")
        if text.done.reason == "timeout":
            service.metrics.timeouts += 1
        if not text.tokens and text.done.reason == "cancelled":
            raise stopping_refusal()
        if not text.tokens and text.done.reason == "timeout":
            wait = service.wait_of()
            told = f"no token came within the {service.config.seconds:g} s that a request may take; try again in {wait} s"
            raise Refusal(429, told, code="timeout", retry_after=wait)


def texts_of(come: Sequence[Event]) -> Iterator[tuple[int, Text]]:
    """What has come, as one text for each place that anything came for, in the order of their first."""
    found: dict[int, Text] = {}
    for place, event in come:
        found.setdefault(place, Text()).add(event)
    yield from found.items()
