"""Runs the application until it is told to stop, and then lets what runs finish."""

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
from textmill.server.app import new_app
from textmill.server.connections import Connection, ConnectionPool
from textmill.server.service import Service

BACKLOG = 2048
DOOR = 0.2
"""Seconds in which a server that stops still tells those who had set out before."""
AFTER = 5.0
"""Seconds after the grace in which the ended texts are still sent."""


class Server(uvicorn.Server):
    """uvicorn, which closes the scheduler as soon as it is told to stop: what runs has the grace to finish."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service, self.problem = service, ""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take nothing new, finish what runs, end the rest with a word."""
        self.problem, self.service.stopping = self.service.problem(), True
        closing = asyncio.create_task(
            asyncio.to_thread(self.service.scheduler.close, self.service.config.shutdown_grace)
        )
        await self._close_door(sockets or [])
        await super().shutdown(sockets)
        await closing

    async def _close_door(self, sockets: list[socket.socket]) -> None:
        """Let nobody come any more, but those in who stand at the door: to shut it in their faces would be to cut them off."""
        loop = asyncio.get_running_loop()
        doors = [listening.dup() for listening in sockets]
        for door in doors:
            door.listen(0)
        await asyncio.sleep(DOOR)
        for server in self.servers:
            server.close()
        last = [line for door in doors for line in _last_at(door)]
        for line in last:
            await loop.connect_accepted_socket(self._new_connection, line)
        await asyncio.sleep(DOOR)

    def _new_connection(self) -> asyncio.Protocol:
        protocol: Any = self.config.http_protocol_class
        new: asyncio.Protocol = protocol(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return new


def _last_at(door: socket.socket) -> list[socket.socket]:
    """Who stands at a door; it is shut behind them."""
    found = []
    door.setblocking(False)
    with door, suppress(OSError):  # nobody is left
        while True:
            found.append(door.accept()[0])
    return found


def run(service: Service, listening: socket.socket) -> str:
    """Serve on a bound socket until SIGTERM or ctrl-C; what was wrong with the model then, empty: nothing."""
    serve = service.config
    protocol: Any = partial(Connection, ConnectionPool(serve.max_connections, serve.read_timeout, service.metrics))
    listening.listen(BACKLOG)  # from here on a client may come, whatever still has to start
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    settings = uvicorn.Config(
        new_app(service), http=protocol, lifespan="off", ws="none", access_log=False, log_level="warning", server_header=False,
        timeout_graceful_shutdown=int(serve.shutdown_grace + AFTER) + 1, backlog=BACKLOG,
    )  # fmt: skip
    if service.key is None and host not in ("127.0.0.1", "::1"):
        warn(
            f"serve.host={serve.host}: whoever reaches this machine may use the model; set serve.key_file to ask for a key"
        )
    step = f" at step {service.step:,}" if service.step else ""
    print(f"{service.name}{step} answers at http://{shown}:{port}/ ; ctrl-C stops", flush=True)
    tune_interpreter()
    # uvicorn raises the signal again once it has stopped, which would end the process as if it had been killed.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = Server(settings, service)
    with suppress(KeyboardInterrupt):
        server.run([listening])
    print("stopped", flush=True)
    return server.problem


def bind(host: str, port: int) -> socket.socket:
    """A socket with the address, which is taken from then on; nobody is let in yet."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise TextmillError(
            f"serve.host: '{host}' is no address of this machine; say 127.0.0.1, or 0.0.0.0 for all"
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
