"""Runs the application until it is stopped, then shuts down gracefully: running texts may finish."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn

from textmill.errors import TextmillError, warn
from textmill.generation.messages import tune_interpreter
from textmill.processes.signals import handled_signals
from textmill.server.app import new_app
from textmill.server.connections import Connection, ConnectionPool
from textmill.server.service import Service

BACKLOG = 2048
DRAIN_SECONDS = 0.2
"""How long a stopping server still answers connections that were made before it stopped listening."""
SEND_SECONDS = 5
"""Time after the grace for sending the ends of cancelled texts."""
FORCE_EXIT_SECONDS = 0.2
"""How often a stopping server checks for a second ctrl-C."""


class Server(uvicorn.Server):
    """uvicorn with a graceful shutdown: running texts have `serve.shutdown_grace` seconds to finish."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self.problem = ""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running texts finish, and end the others with an error. Until then, reply to new requests with 503."""
        self.problem = self.service.problem()
        self.service.stopping = True
        close = self.service.model.close
        closing = asyncio.create_task(asyncio.to_thread(close, self.service.config.shutdown_grace))
        while not closing.done() and not self.force_exit:
            await asyncio.wait({closing}, timeout=FORCE_EXIT_SECONDS)
        if not closing.done():  # a second ctrl-C
            await asyncio.to_thread(close, 0)
        await self._stop_listening(sockets or [])
        await super().shutdown(sockets)
        await closing

    async def _stop_listening(self, sockets: list[socket.socket]) -> None:
        """Stop listening, but accept connections that are already in the backlog, so that they get a reply."""
        loop = asyncio.get_running_loop()
        copies = [listening.dup() for listening in sockets]
        for copy in copies:
            copy.listen(0)
        await asyncio.sleep(DRAIN_SECONDS)
        for server in self.servers:
            server.close()
        for copy in copies:
            for connection in _accept_pending(copy):
                await loop.connect_accepted_socket(self._new_connection, connection)
        await asyncio.sleep(DRAIN_SECONDS)

    def _new_connection(self) -> asyncio.Protocol:
        protocol: Any = self.config.http_protocol_class
        new: asyncio.Protocol = protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return new


def _accept_pending(listening: socket.socket) -> list[socket.socket]:
    """Accept all connections in the backlog, then close the listening socket."""
    found = []
    listening.setblocking(False)
    with listening, suppress(OSError):  # the backlog is empty
        while True:
            found.append(listening.accept()[0])
    return found


def run(service: Service, listening: socket.socket) -> str:
    """Serve on a bound socket until SIGTERM, SIGHUP or ctrl-C; return what was wrong with the model then, or
    nothing."""
    serve = service.config
    protocol: Any = partial(Connection, ConnectionPool(serve.max_connections, serve.read_timeout, service.metrics))
    listening.listen(BACKLOG)  # clients may connect from here on; they wait in the backlog
    host, port = listening.getsockname()[:2]
    host_in_url = f"[{host}]" if ":" in host else host
    settings = uvicorn.Config(
        new_app(service),
        http=protocol,
        lifespan="off",
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=SEND_SECONDS,
        backlog=BACKLOG,
    )
    if service.key is None and host not in ("127.0.0.1", "::1"):
        warn(f"serve.host={serve.host}: anyone who can reach this machine can use the model; set serve.key_file")
    step = f" at step {service.step:,}" if service.step else ""
    print(f"serving {service.name}{step} at http://{host_in_url}:{port}/ ; ctrl-C stops", flush=True)
    tune_interpreter()
    server = Server(settings, service)
    # uvicorn raises the signal again after it has stopped. That would end the process as if it had been killed.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if signal.SIGHUP in handled_signals():  # a closed terminal stops it like SIGTERM; uvicorn does not know it
            signal.signal(signal.SIGHUP, lambda *_: server.handle_exit(signal.SIGTERM, None))
    with suppress(KeyboardInterrupt):
        server.run([listening])
    print("stopped", flush=True)
    return server.problem


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address. It reserves the port but does not listen yet."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise TextmillError(
            f"serve.host: '{host}' is not an address of this machine; use 127.0.0.1, or 0.0.0.0 for all addresses"
        ) from None
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise TextmillError(
            f"serve.port: cannot listen on {host}:{port}: {error.strerror}; choose another serve.port or serve.host"
        ) from None
    return listening
