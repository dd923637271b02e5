"""EventStream: texts sent as server-sent events while they are made, and ended with a word whatever happens."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from fastapi import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from textmill.server.error_replies import HttpError, error_body
from textmill.server.in_flight import Event, InFlightRequest, left
from textmill.server.service import Service

STALLED = 60.0
"""Seconds that a client may leave a sent event unread."""

Tree = dict[str, Any]


class EventStream(Response):
    """A response that follows a flight: `begin` gives the first chunks, `step` those of what has come, `end` the last.

    Every chunk begins with `head`, which is written out once.
    """

    media_type = "text/event-stream"

    def __init__(
        self, service: Service, flight: InFlightRequest, head: Tree, begin: Iterable[Tree], step: Callable[[list[Event]], Iterable[Tree]],
        end: Callable[[], Iterable[Tree]],
    ) -> None:  # fmt: skip
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.service, self.flight, self.begin, self.step, self.end = service, flight, begin, step, end
        self.head = written(head).removesuffix(b"}") + b","
        self.putting = math.inf
        """Since when the client has been sent something that it makes no room for; a timer an event would cost as much as the event."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; a client that leaves ends the texts."""
        sent, gone = asyncio.create_task(self._send(send)), asyncio.create_task(left(receive))
        try:
            while not (await asyncio.wait({sent, gone}, timeout=STALLED / 4, return_when=asyncio.FIRST_COMPLETED))[0]:
                if time.monotonic() - self.putting > STALLED:
                    break
            if not sent.done():
                self.service.metrics.left += 1
                scope.setdefault("told", {})["ended"] = "left"
            elif isinstance(error := sent.exception(), OSError):
                scope.setdefault("told", {})["ended"] = "left"
            elif error is not None:
                raise error
        finally:
            sent.cancel()
            gone.cancel()
            if self.flight.ended < len(self.flight.numbers):
                self.flight.cancel()

    async def _send(self, send: Send) -> None:
        async def put(data: bytes, more: bool = True) -> None:
            self.putting = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": more})
            self.putting = math.inf

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await put(_lines(self.begin, self.head))
        first = True
        try:
            async for come in self.flight.events():
                if not come:  # so that nothing between takes the line for dead
                    await put(b": waiting\n\n")
                    continue
                if first:
                    first = False
                    self.service.metrics.first.add(self.flight.seconds())
                await put(_lines(self.step(come), self.head) + _lines(self._troubles(come)))
        except HttpError as refusal:
            await put(_lines([error_body(refusal.status, refusal.message, code=refusal.code)]))
        await put(_lines(self.end(), self.head) + b"data: [DONE]\n\n", more=False)

    def _troubles(self, come: list[Event]) -> Iterable[Tree]:
        """What a client must know besides the text: the model failed, or the server is stopping."""
        for done in [part.done for _, part in come if part.done is not None]:
            if done.reason == "error":
                yield error_body(500, done.message or "the model failed; the server's log says how", code="model_error")
            elif done.reason == "cancelled":
                yield error_body(503, "the server is stopping; the text was ended early", code="stopping")
            elif done.reason == "timeout":
                self.service.metrics.timeouts += 1


def written(tree: Tree) -> bytes:
    """An object as JSON, which has no words for what is no number."""
    return to_json(tree, inf_nan_mode="null")


def _lines(trees: Iterable[Tree], head: bytes = b"{") -> bytes:
    return b"".join([b"data: %b%b\n\n" % (head, written(tree)[1:]) for tree in trees])
