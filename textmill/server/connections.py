"""Limits connections: how many may be open, and how long a client may take to send a request or read a reply.

uvicorn has no such limits: its timeout_keep_alive ends only connections that are silent between two requests, so one
that sends a byte now and then stays for ever; its limit_concurrency refuses new clients instead of closing idle
connections; and its httptools parser has no limit for the header. Replies here have the format of all errors.

A connection waits, with a timer and in `ConnectionPool.waiting`, until its client has sent a complete request. While
the request is answered there is no timer. After the reply it waits for the next request, and another timer checks that
the client reads the reply. A connection in `ConnectionPool.rejected` has got its last reply, and its input is ignored.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
from asyncio import TimerHandle
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from textmill.errors import TextmillError
from textmill.server.errors import error_body
from textmill.server.metrics import Metrics

MIN_BYTES_PER_SECOND = 16 * 1024
"""A client that sends or reads more slowly than this runs out of time eventually."""
UNREAD_SECONDS = 60.0
"""How long a client may leave a reply unread."""
LINGER_SECONDS = 1.0
"""How long a rejected connection stays open, so that the client can read the reason."""
MAX_HEADER = 64 * 1024
"""Largest request header in bytes, approximately."""
NOT_ASCII = re.compile(rb"[\x80-\xff]")
"""Bytes that httptools refuses in a URL, but that people type and curl sends: they are escaped."""
OTHER_FILES = 256
"""Open files that are not client connections."""


@dataclass
class ConnectionPool:
    """The open connections of one server. When it is full, the idle connection that has waited longest is closed."""

    limit: int
    seconds: float
    """Time in which a client must send its request."""
    metrics: Metrics
    waiting: dict[Connection, None] = field(default_factory=dict)
    """Connections without a complete request, in the order in which they began to wait."""
    rejected: set[Connection] = field(default_factory=set)

    def drop_oldest(self) -> bool:
        """Close the connection that has waited longest for a request; return whether there was one."""
        if not self.waiting:
            return False
        next(iter(self.waiting)).drop()
        self.metrics.crowded += 1
        return True


class Connection(HttpToolsProtocol):
    """A connection with time-outs for the header, the body and an unread reply."""

    def __init__(self, pool: ConnectionPool, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self.pool = pool
        self._wait_started = 0.0
        self._received = 0
        self._in_header = False
        self._in_request_line = True
        self._timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a client. If the pool is full, drop an idle connection, or reject this one."""
        if len(self.connections) >= self.pool.limit and not self.pool.drop_oldest():
            self._reject(transport)
            return
        super().connection_made(transport)
        self.pool.metrics.connections = len(self.connections)
        self._start_waiting()

    def _reject(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.pool.metrics.crowded += 1
        if len(self.pool.rejected) >= self.pool.limit:
            transport.abort()
        else:
            message = "the server has reached its limit of connections; try again in 1 s"
            self._reply_and_close(_format_reply(503, message, "crowded", b"retry-after: 1\r\n"))

    def _reply_and_close(self, reply: bytes) -> None:
        """Send a last reply and ignore further input. Closing at once could lose the reply."""
        self.pool.rejected.add(self)
        self.transport.write(reply)
        self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove a closed connection."""
        self.pool.rejected.discard(self)
        self._stop_waiting()
        super().connection_lost(exc)
        self.pool.metrics.connections = len(self.connections)

    def data_received(self, data: bytes) -> None:
        """Parse input, and reject a header that is too large."""
        if self in self.pool.rejected:
            return
        if self._in_request_line:
            line, newline, rest = data.partition(b"\n")
            data = NOT_ASCII.sub(_escape_byte, line) + newline + rest
            self._in_request_line = not newline
        super().data_received(data)
        self._received += len(data)
        if self._in_header and self._received > MAX_HEADER:
            self._stop_waiting()
            if self._is_answering():  # a second reply may not overtake the first
                self.transport.abort()
            else:
                message = f"the header is larger than {MAX_HEADER:,} bytes; send a smaller one"
                self._reply_and_close(_format_reply(431, message, "header_too_large"))

    def on_message_begin(self) -> None:
        """A request starts; with pipelining, perhaps while another is answered."""
        self._start_waiting()
        self._in_header = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The header is complete; the body follows."""
        self._in_header = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request has arrived in time."""
        self._stop_waiting()
        self._in_request_line = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The reply is written: wait for the next request, and check that the client reads the reply."""
        super().on_response_complete()
        if not self.transport.is_closing() and not self._is_answering() and self not in self.pool.waiting:
            self._start_waiting()
        if unread := self.transport.get_write_buffer_size():
            self.loop.call_later(UNREAD_SECONDS, self._check_reader, unread)

    def _check_reader(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread and unread > before - MIN_BYTES_PER_SECOND * UNREAD_SECONDS:
            self.pool.metrics.slow += 1
            self.transport.abort()
        elif unread:
            self.loop.call_later(UNREAD_SECONDS, self._check_reader, unread)

    def _start_waiting(self) -> None:
        """Start, or restart, the time-out for the next request."""
        self._stop_waiting()
        self.pool.waiting[self] = None
        self._wait_started = self.loop.time()
        self._received = 0
        self._timer = self.loop.call_later(self.pool.seconds, self._check_sender)

    def _stop_waiting(self) -> None:
        self.pool.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_sender(self) -> None:
        allowed = self.pool.seconds + self._received / MIN_BYTES_PER_SECOND
        left = self._wait_started + allowed - self.loop.time()
        if self._is_answering():  # uvicorn does not read a pipelined request before the first one is answered
            self._start_waiting()
        elif left > 0:
            self._timer = self.loop.call_later(left, self._check_sender)
        else:
            self.pool.metrics.slow += 1
            self.drop()

    def _is_answering(self) -> bool:
        return bool(self.pipeline) or (
            self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        )

    def drop(self) -> None:
        """Close a connection that takes too long; if it has sent part of a request, reply with 408 first."""
        self._stop_waiting()
        if self.transport.get_write_buffer_size():  # the client does not read either
            self.transport.abort()
            return
        answered = self.cycle is not None and self.cycle.more_body and self.cycle.response_started
        if self._received and not answered:
            message = f"the request was not complete within {self.pool.seconds:g} s; send it faster"
            self.transport.write(_format_reply(408, message, "slow"))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Reply to input that is not HTTP, in the same format as all errors."""
        self.transport.write(_format_reply(400, "the request is not valid HTTP; send HTTP/1.1", "no_http"))
        self.transport.close()


def _escape_byte(byte: re.Match[bytes]) -> bytes:
    return b"%%%02X" % byte[0][0]


def _format_reply(status: int, message: str, code: str, headers: bytes = b"") -> bytes:
    body = json.dumps(error_body(status, message, code=code)).encode()
    head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
    return STATUS_LINE[status] + head + headers + b"\r\n" + body


def raise_file_limit(connections: int) -> int:
    """Raise the process's limit of open files for so many connections; return how many of them this system allows."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = connections + OTHER_FILES
    files = files if most == resource.RLIM_INFINITY else min(files, most)
    if files <= OTHER_FILES:
        raise TextmillError(
            f"serve: this system lets a process open {most} files; a server needs more than {OTHER_FILES}; raise its "
            "hard limit (ulimit -Hn 4096)"
        )
    if now != resource.RLIM_INFINITY and files > now:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    return files - OTHER_FILES
