"""Streams texts to a client as server-sent events.

A client that requests the text " mill." reads, for instance:

    data: {"id":"cmpl-1","object":"text_completion",...,"choices":[{"index":0,"text":" mill","finish_reason":null,...}]}

    data: {"id":"cmpl-1","object":"text_completion",...,"choices":[{"index":0,"text":".","finish_reason":"stop",...}]}

    data: [DONE]
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from fastapi import Response
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from textmill.server.error_replies import HttpError, error_body
from textmill.server.in_flight import IndexedChunk, InFlightRequest, wait_for_disconnect
from textmill.server.service import Service

STALLED_SECONDS = 60.0
"""How long a client may leave an event unread."""

JsonObject = dict[str, Any]


class StreamedReply(Protocol):
    """The events of one request, in the format of its route."""

    chunk_head: JsonObject
    """The fields with which every chunk starts."""

    def first_chunks(self) -> Iterable[JsonObject]: ...
    def next_chunks(self, received: list[IndexedChunk]) -> Iterable[JsonObject]: ...
    def last_chunks(self) -> Iterable[JsonObject]: ...


class EventStream(Response):
    """Streams an in-flight request: the first chunks, those of new text, the last chunks, then `[DONE]`.

    `on_end` is called when all texts have ended, before the last chunks.
    """

    media_type = "text/event-stream"

    def __init__(
        self, service: Service, in_flight: InFlightRequest, reply: StreamedReply, on_end: Callable[[], None]
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.service = service
        self.in_flight = in_flight
        self.reply = reply
        self.on_end = on_end
        self.head = to_json_bytes(reply.chunk_head).removesuffix(b"}") + b","  # encoded once for all chunks
        self.send_started = math.inf
        """When the current send started. It blocks while the client does not read (backpressure).

        One check every 15 s replaces a timer per event, which would cost as much as the event.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; cancel the texts if the client disconnects or stops reading."""
        sender = asyncio.create_task(self._send_all(send))
        disconnect = asyncio.create_task(wait_for_disconnect(receive))
        ended: set[asyncio.Task[None]] = set()
        try:
            while not ended and not self._is_stalled():
                ended, _ = await asyncio.wait(
                    {sender, disconnect}, timeout=STALLED_SECONDS / 4, return_when=asyncio.FIRST_COMPLETED
                )
            error = sender.exception() if sender.done() else None
            if not sender.done() or isinstance(error, OSError):  # the client has left, or does not read
                self.service.metrics.disconnects += 1
                scope.setdefault("log_fields", {})["ended"] = "left"
            elif error is not None:
                raise error
        finally:
            sender.cancel()
            disconnect.cancel()
            if not self.in_flight.complete:
                self.in_flight.cancel()

    def _is_stalled(self) -> bool:
        return time.monotonic() - self.send_started > STALLED_SECONDS

    async def _send_all(self, send: Send) -> None:
        async def send_data(data: bytes, more: bool = True) -> None:
            self.send_started = time.monotonic()
            await send({"type": "http.response.body", "body": data, "more_body": more})
            self.send_started = math.inf

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send_data(_format_events(self.reply.first_chunks(), self.head))
        first = True
        try:
            async for received in self.in_flight.chunks():
                if not received:  # a keep-alive comment, so that no proxy closes the connection
                    await send_data(b": waiting\n\n")
                    continue
                if first:
                    first = False
                    self.service.metrics.first_token.add(self.in_flight.seconds())
                events = _format_events(self.reply.next_chunks(received), self.head)
                await send_data(events + _format_events(self._find_errors(received)))
        except HttpError as error:
            await send_data(_format_events([error_body(error.status, error.message, code=error.code)]))
        self.on_end()
        await send_data(_format_events(self.reply.last_chunks(), self.head) + b"data: [DONE]\n\n", more=False)

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
    """Return objects as events; `head` replaces the opening brace of each."""
    return b"".join([b"data: %b%b\n\n" % (head, to_json_bytes(one)[1:]) for one in objects])
