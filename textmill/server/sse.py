"""Streams texts to a client as server-sent events."""

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
from textmill.server.in_flight import IndexedChunk, InFlightRequest, wait_for_disconnect
from textmill.server.service import Service

STALLED_SECONDS = 60.0
"""How long a client may leave an event unread."""

JsonObject = dict[str, Any]


class EventStream(Response):
    """Streams an in-flight request: the first chunks, those of new text, the last chunks, then `[DONE]`.

    Every chunk starts with the fields of `head`, which are encoded once.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        service: Service,
        in_flight: InFlightRequest,
        head: JsonObject,
        first_chunks: Iterable[JsonObject],
        next_chunks: Callable[[list[IndexedChunk]], Iterable[JsonObject]],
        last_chunks: Callable[[], Iterable[JsonObject]],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.service, self.in_flight = service, in_flight
        self.first_chunks, self.next_chunks, self.last_chunks = first_chunks, next_chunks, last_chunks
        self.head = to_json_bytes(head).removesuffix(b"}") + b","
        self.send_started = math.inf
        """When the current send started. It blocks while the client does not read (backpressure).

        One check every 15 s replaces a timer per event, which would cost as much as the event.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; cancel the texts if the client disconnects or stops reading."""
        sender = asyncio.create_task(self._send_all(send))
        disconnect = asyncio.create_task(wait_for_disconnect(receive))
        tasks, every = {sender, disconnect}, STALLED_SECONDS / 4
        try:
            while not (await asyncio.wait(tasks, timeout=every, return_when=asyncio.FIRST_COMPLETED))[0]:
                if time.monotonic() - self.send_started > STALLED_SECONDS:
                    break
            if not sender.done():
                self.service.metrics.disconnects += 1
                scope.setdefault("log_fields", {})["ended"] = "left"
            elif isinstance(error := sender.exception(), OSError):
                scope.setdefault("log_fields", {})["ended"] = "left"
            elif error is not None:
                raise error
        finally:
            sender.cancel()
            disconnect.cancel()
            if self.in_flight.ended < len(self.in_flight.numbers):
                self.in_flight.cancel()

    async def _send_all(self, send: Send) -> None:
        async def send_data(data: bytes, more: bool = True) -> None:
            self.send_started = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": more})
            self.send_started = math.inf

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send_data(_format_events(self.first_chunks, self.head))
        first = True
        try:
            async for received in self.in_flight.chunks():
                if not received:  # a keep-alive comment, so that no proxy closes the connection
                    await send_data(b": waiting\n\n")
                    continue
                if first:
                    first = False
                    self.service.metrics.first_token.add(self.in_flight.seconds())
                events = _format_events(self.next_chunks(received), self.head)
                await send_data(events + _format_events(self._find_errors(received)))
        except HttpError as error:
            await send_data(_format_events([error_body(error.status, error.message, code=error.code)]))
        await send_data(_format_events(self.last_chunks(), self.head) + b"data: [DONE]\n\n", more=False)

    def _find_errors(self, received: list[IndexedChunk]) -> Iterable[JsonObject]:
        """Yield an error event if the model failed or the server is stopping."""
        for done in [chunk.done for _, chunk in received if chunk.done is not None]:
            if done.reason == "error":
                yield error_body(500, done.message or "the model failed; see the server's log", code="model_error")
            elif done.reason == "cancelled":
                yield error_body(503, "the server is stopping; the text was ended early", code="stopping")
            elif done.reason == "timeout":
                self.service.metrics.timeouts += 1


def to_json_bytes(value: JsonObject) -> bytes:
    """Encode an object as JSON; NaN and infinity become null."""
    return to_json(value, inf_nan_mode="null")


def _format_events(objects: Iterable[JsonObject], head: bytes = b"{") -> bytes:
    return b"".join([b"data: %b%b\n\n" % (head, to_json_bytes(one)[1:]) for one in objects])
