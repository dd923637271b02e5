"""Connections are limited in number and time: slow clients are closed, others get in, refused ones get an error."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from tests.support import web
from tests.support.live_server import Live
from tests.support.waiting import LONGEST, wait_for
from textmill.errors import TextmillError
from textmill.server import connections
from textmill.server.connections import Connection, ConnectionPool, raise_file_limit
from textmill.server.metrics import Metrics

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def connect(live: Live) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=LONGEST)


def rest(line: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    got = b""
    try:
        while part := line.recv(65536):
            got += part
    except ConnectionResetError:
        pass
    return got


def drip(line: socket.socket, byte: bytes) -> bytes:
    """Send a byte now and then until the server closes the connection; return its reply."""
    end = time.monotonic() + LONGEST
    line.settimeout(0.1)
    got = b""
    while time.monotonic() < end:
        try:
            part = line.recv(65536)
            if not part:
                return got
            got += part
        except TimeoutError:
            line.sendall(byte)
        except OSError:
            return got
    raise AssertionError(f"the server waits for ever; it sent {got!r}")


@pytest.fixture(scope="module")
def hasty(new_live: Callable[..., Live]) -> Live:
    return new_live({"limits": {"READ_SECONDS": 5.0}, "serve": {"max_body": 300_000}})


def send_slowly(live: Live, first: bytes, byte: bytes) -> bytes:
    """Return the reply to a request that is never complete."""
    with connect(live) as line:
        line.sendall(first)
        return drip(line, byte)


@pytest.mark.long
def test_slow_clients_get_an_error_and_are_closed(hasty: Live) -> None:
    before = hasty.stats()["connections_slow_total"]
    answered = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    slow_requests = [
        (HEAD, b"x"),
        (HEAD + b"Content-Length: 500\r\n\r\n{", b"x"),
        (answered + b"GET /hea", b"x"),
        (answered, b"\r\n"),
    ]
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(send_slowly, hasty, *one) for one in slow_requests]
        refused = pool.submit(send_slowly, hasty, HEAD + b"Content-Length: 1000000\r\n\r\n", b"x")
        with connect(hasty) as line:
            assert rest(line) == b"", "a connection without a request gets no reply"
    for one in found:
        status, _, body = one.result().rpartition(b"\r\n\r\n")
        assert b"HTTP/1.1 408" in status
        assert json.loads(body)["error"]["message"] == "the request was not complete within 5 s; send it faster"
    assert refused.result().startswith(b"HTTP/1.1 413"), "a body that was refused does not hold its connection"
    assert b"408" not in refused.result(), "it has its answer"
    assert hasty.stats()["connections_slow_total"] >= before + 6


@pytest.fixture(scope="module")
def narrow(new_live: Callable[..., Live]) -> Live:
    limits = {"READ_SECONDS": LONGEST, "MIN_CONNECTIONS": 4}
    return new_live({"delay": 0.02, "limits": limits, "serve": {"slots": 4, "queue": 0, "max_tokens": 10**9}})


@pytest.mark.long
def test_header_size_is_limited(narrow: Live) -> None:
    for endless in (b"X: " + b"x" * 100, b"".join(b"X-%d: x\r\n" % number for number in range(20))):
        with connect(narrow) as line:
            with suppress(OSError):  # the server may close the connection
                line.sendall(HEAD + endless * 3000)
            status, _, body = rest(line).partition(b"\r\n\r\n")
        if status:  # lost if the connection was closed while bytes were on the way
            assert status.startswith(b"HTTP/1.1 431")
            assert json.loads(body)["error"]["message"] == "the header is larger than 65,536 bytes; send a smaller one"
    with connect(narrow) as line:
        line.sendall(HEAD + b"X: " + b"x" * 70_000)
        assert rest(line).startswith(b"HTTP/1.1 431")
    body = json.dumps({"prompt": "The mill", "max_tokens": 10**9, "stream": True}).encode()
    with connect(narrow) as line:
        line.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert line.recv(1000).startswith(b"HTTP/1.1 200")
        with suppress(OSError):
            line.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000)
        assert b"[DONE]" not in rest(line), "also after a request that is being answered"
    assert narrow.wait_idle()["cancelled_total"] == 1


class FakeLoop:
    """An event loop whose clock moves only by `advance`."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, list[tuple[float, Callable[[], None]]]()

    def time(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: Callable[..., None], *args: Any) -> Any:
        entry = (self.now + seconds, lambda: call(*args))
        self.calls.append(entry)
        return SimpleNamespace(cancel=lambda: self.calls.remove(entry) if entry in self.calls else None)

    def create_task(self, work: Any, **options: Any) -> Any:
        work.close()
        return Future[None]()

    def advance(self, now: float) -> None:
        self.now = now
        while due := [entry for entry in self.calls if entry[0] <= now]:
            self.calls.remove(due[0])
            due[0][1]()


class FakeTransport:
    """A transport that records what is written."""

    def __init__(self) -> None:
        self.written, self.closed = b"", False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> Any:
        return None

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


def test_long_body_gets_more_time() -> None:
    loop, line = FakeLoop(), FakeTransport()
    pool = ConnectionPool(10, 2.0, Metrics())
    config = Config(large, lifespan="off")
    config.load()
    one: Any = Connection(pool, config=config, server_state=ServerState(), app_state={}, _loop=loop)
    one.connection_made(line)
    head = HEAD + b"Content-Length: 200000\r\n\r\n"
    one.data_received(head + b"a" * 150_000)
    allowed = 2.0 + (len(head) + 150_000) / connections.MIN_BYTES_PER_SECOND
    loop.advance(allowed - 0.1)
    assert not line.closed
    one.data_received(b"a")
    loop.advance(allowed)
    assert not line.closed, "another byte adds some time"
    loop.advance(allowed + 0.1)
    assert line.closed
    assert line.written.startswith(b"HTTP/1.1 408")


@pytest.mark.long
def test_idle_connections_are_closed_for_new_ones_and_active_ones_are_not(narrow: Live) -> None:
    idle = [connect(narrow) for _ in range(4)]
    assert web.get(f"{narrow.url}/health").status_code == 200
    assert rest(idle[0]) == b"", "the longest idle connection is closed"
    body = json.dumps({"prompt": "The mill", "max_tokens": 10**9, "stream": True}).encode()
    working = [connect(narrow) for _ in range(4)]
    for line in working:
        line.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert line.recv(1000).startswith(b"HTTP/1.1 200")
    reply = web.get(f"{narrow.url}/health")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert "reached its limit of connections" in reply.json()["error"]["message"]
    for line in working:
        assert line.recv(1000), "texts continue"
        line.close()
    wait_for(lambda: web.get(f"{narrow.url}/health").status_code == 200)
    stats = narrow.wait_idle()
    assert stats["connections"] <= 4
    assert stats["connections_crowded_total"] >= 5
    for line in idle:
        line.close()
    assert narrow.stop() == 0
    assert "Traceback" not in "".join(narrow.output)


async def large(scope: Any, receive: Any, send: Any) -> None:
    """An application whose reply is larger than the socket buffers."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x" * 50_000_000})


async def unread(pool: ConnectionPool) -> None:
    """Request the large reply and read nothing, until the server closes the connection."""
    config, loop = Config(large, lifespan="off"), asyncio.get_running_loop()
    state = ServerState()
    server = await loop.create_server(
        lambda: Connection(pool, config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    with socket.create_connection(server.sockets[0].getsockname()[:2]) as line:
        line.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        end = loop.time() + LONGEST
        while not pool.metrics.slow or state.connections:
            assert loop.time() < end
            await asyncio.sleep(0.02)
    server.close()


def test_connection_is_closed_if_the_reply_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.2)
    pool = ConnectionPool(10, 60.0, Metrics())
    asyncio.run(unread(pool))
    assert not pool.waiting


def test_file_limit_is_raised_for_connections() -> None:
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, most))
        assert raise_file_limit(500) == 500
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 756
        if most != resource.RLIM_INFINITY:
            assert raise_file_limit(most) == most - 256, "as many as the system allows"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, most))


def test_a_file_limit_without_room_for_connections_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (200, 256))
    with pytest.raises(TextmillError, match="lets a process open 256 files; a server needs more than 256; raise"):
        raise_file_limit(500)
