"""Connections: how many there may be, and how long a client may take to send its request or to read the reply."""

from __future__ import annotations

import asyncio
import json
import resource
from asyncio import TimerHandle
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from textmill.config import ServeConfig
from textmill.errors import TextmillError
from textmill.server.error_replies import error_body
from textmill.server.metrics import Metrics

RATE = 16 * 1024
"""Bytes a second; who sends or reads more slowly runs out of time sooner or later."""
UNREAD = 60.0
"""Seconds that a client may leave the whole of a reply unread."""
LINGER = 1.0
"""Seconds that a client which is hung up on has to read why."""
HEADER = 64 * 1024
"""Bytes of a request's header at most, more or less."""
FILES = 256
"""Open files that are none of a client's."""


@dataclass
class ConnectionPool:
    """The connections of one server: those that wait are known by the time they have waited, so that one of them can make room."""

    limit: int
    seconds: float
    metrics: Metrics
    waiting: dict[Connection, None] = field(default_factory=dict)
    """Connections whose next request has not come whole, the oldest first."""
    refused: set[Connection] = field(default_factory=set)

    def make_room(self) -> bool:
        """Let the one go that has waited longest; whether there was one."""
        if not self.waiting:
            return False
        next(iter(self.waiting)).drop()
        self.metrics.crowded += 1
        return True


class Connection(HttpToolsProtocol):
    """A connection that does not wait for ever: not for a header, not for a body, not for a reply to be read."""

    def __init__(self, crowd: ConnectionPool, **given: Any) -> None:
        super().__init__(**given)
        self.crowd, self._begun, self._count, self._in_header = crowd, 0.0, 0, False
        self._timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a client in; where there is no room, one that waits makes it, or the new one is told."""
        if len(self.connections) >= self.crowd.limit and not self.crowd.make_room():
            self._refuse(transport)
            return
        super().connection_made(transport)
        self.crowd.metrics.connections = len(self.connections)
        self._wait()

    def _refuse(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.crowd.metrics.crowded += 1
        if len(self.crowd.refused) >= self.crowd.limit:
            transport.abort()
        else:
            told = "the server has all the connections that it may have; try again in 1 s"
            self._hang_up(_reply(503, told, "crowded", b"retry-after: 1\r\n"))

    def _hang_up(self, reply: bytes) -> None:
        """Say why and listen no more; to close on what is still being sent would take the words away again."""
        self.crowd.refused.add(self)
        self.transport.write(reply)
        self.transport.write_eof()
        self.loop.call_later(LINGER, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a client."""
        self.crowd.refused.discard(self)
        self._go_on()
        super().connection_lost(exc)
        self.crowd.metrics.connections = len(self.connections)

    def data_received(self, data: bytes) -> None:
        """Read on, but no header without end; what a client that was hung up on still sends is nobody's."""
        if self in self.crowd.refused:
            return
        super().data_received(data)
        self._count += len(data)
        if self._in_header and self._count > HEADER:
            self._go_on()
            if self._at_work():  # what is being answered stands before it on the line
                self.transport.abort()
            else:
                self._hang_up(_reply(431, f"the header is larger than {HEADER:,} bytes; send less", "header_too_large"))

    def on_message_begin(self) -> None:
        """A request begins, maybe behind another one."""
        self._wait()
        self._in_header = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A header is there; what follows is the body's."""
        self._in_header = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A request is there as a whole."""
        self._go_on()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A request is answered; the reply wants to be read, and the next request may come."""
        super().on_response_complete()
        if not self.transport.is_closing() and not self._at_work() and self not in self.crowd.waiting:
            self._wait()
        if unread := self.transport.get_write_buffer_size():
            self.loop.call_later(UNREAD, self._look_at_reader, unread)

    def _look_at_reader(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread and unread > before - RATE * UNREAD:
            self.crowd.metrics.slow += 1
            self.transport.abort()
        elif unread:
            self.loop.call_later(UNREAD, self._look_at_reader, unread)

    def _wait(self) -> None:
        """Begin to wait for a request, anew where one was waited for already."""
        self._go_on()
        self.crowd.waiting[self] = None
        self._begun, self._count = self.loop.time(), 0
        self._timer = self.loop.call_later(self.crowd.seconds, self._look_at_sender)

    def _go_on(self) -> None:
        self.crowd.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at_sender(self) -> None:
        left = self._begun + self.crowd.seconds + self._count / RATE - self.loop.time()
        if self._at_work():  # what stands behind a request is not read before that is answered
            self._wait()
        elif left > 0:
            self._timer = self.loop.call_later(left, self._look_at_sender)
        else:
            self.crowd.metrics.slow += 1
            self.drop()

    def _at_work(self) -> bool:
        return bool(self.pipeline) or (
            self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        )

    def drop(self) -> None:
        """Hang up on a client that takes too long; one that has begun a request is told."""
        self._go_on()
        if self.transport.get_write_buffer_size():  # it does not read either
            self.transport.abort()
            return
        answered = self.cycle is not None and self.cycle.more_body and self.cycle.response_started
        if self._count and not answered:
            told = f"the request did not come whole within {self.crowd.seconds:g} s; send it faster"
            self.transport.write(_reply(408, told, "slow"))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Say that what came is no HTTP, in the shape of every other refusal."""
        self.transport.write(_reply(400, "the request cannot be read; send HTTP/1.1", "no_http"))
        self.transport.close()


def _reply(status: int, message: str, code: str, headers: bytes = b"") -> bytes:
    body = json.dumps(error_body(status, message, code=code)).encode()
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
    return STATUS_LINE[status] + head + headers + b"\r\n" + body


def raise_file_limit(serve: ServeConfig) -> None:
    """Have the system let the process open as many files as the connections may want."""
    wanted, (now, most) = serve.max_connections + FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and wanted > most:
        raise TextmillError(
            f"serve.max_connections: {serve.max_connections:,} want {wanted:,} open files, of which this system allows {most:,}; "
            f"take {max(most - FILES, 0):,} at most, or raise ulimit -n"
        )
    if now != resource.RLIM_INFINITY and wanted > now:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
