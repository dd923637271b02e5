"""The serve command: opens a model, answers requests until it is stopped, then shuts down: running texts may finish."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn

from textmill.checkpoints.folders import Checkpoint, StepChoice, list_checkpoints
from textmill.config import RunConfig, ServeConfig
from textmill.errors import EXIT_BUG, AlreadyReported, TextmillError, warn
from textmill.generation.embed import can_embed, new_text_encoder
from textmill.generation.fill import new_masked_texts
from textmill.generation.requests import check_served_settings
from textmill.generation.worker import tune_interpreter
from textmill.models import find_run_model, has_masked_head, open_family, read_shape
from textmill.processes.signals import handled_signals
from textmill.server.app import new_app
from textmill.server.connections import Connection, ConnectionPool, raise_file_limit
from textmill.server.metrics import Metrics
from textmill.server.model_process import new_model_process
from textmill.server.service import ServedModels, Service
from textmill.tokens.chat import open_template
from textmill.where import Where

BACKLOG = 2048
MIN_CONNECTIONS = 1000
"""Connections that may be open; more, if so many texts may run and wait."""
READ_SECONDS = 10.0
"""Time in which a client must send its request; a long one gets more."""
DRAIN_SECONDS = 0.2
"""How long a stopping server still answers connections that were made before it stopped listening."""
SEND_SECONDS = 5
"""Time after the grace for sending the ends of cancelled texts."""
FORCE_EXIT_SECONDS = 0.2
"""How often a stopping server checks for a second ctrl-C."""
FOLLOW_SECONDS = 2.0
"""How often `--follow` looks for a newer checkpoint."""
KEY_VARIABLE = "TEXTMILL_API_KEY"
MIN_KEY_LENGTH = 8


def serve(
    config: RunConfig,
    others: Sequence[Where] = (),
    step: StepChoice | None = None,
    follow: bool = False,
    preferences: str | None = None,
) -> None:
    """Serve a model over HTTP until stopped, and others beside it.

    `follow`: change to each newer checkpoint. `preferences`: a file for the answers that users of the page prefer.
    """
    listening = bind(config.serve.host, config.serve.port)  # first, because loading the model may take minutes
    key = read_api_key(config.serve)
    if preferences is not None:
        with open(preferences, "a"):  # fails now if it cannot be written
            pass
    services = [open_service(config, "latest" if follow else step)]
    for other in others:
        services.append(open_service(other.config, "latest" if follow else other.step, beside=services[0]))
    check_names(services)
    services[0].model.start()
    configs = [config, *(other.config for other in others)]
    followed = [
        FollowedRun(service, one)
        for service, one in zip(services, configs, strict=True)
        if follow and list_checkpoints(one.folder_of("train"))
    ]
    if follow and not followed:
        raise TextmillError("--follow: there is no run to follow; give the folder of a run, or leave it out")
    models = ServedModels(services, key, None if preferences is None else Path(preferences))
    if run(models, listening, followed):
        raise AlreadyReported(EXIT_BUG)


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


def open_service(config: RunConfig, step: StepChoice | None = None, beside: Service | None = None) -> Service:
    """Open the service of a config; its model has a process of its own, which is not started yet.

    A service `beside` another one shares its config and metrics.
    """
    serve = config.serve if beside is None else beside.config
    check_served_settings(config.sample)
    checkpoint = find_run_model(config, step)
    shape = read_shape(checkpoint.folder)
    generates = open_family(shape.family).OBJECTIVE == "next_token"
    template = open_template(checkpoint.tokenizer) if generates else None
    model = new_model_process(checkpoint, config.engine, serve, config.embed)
    tokenizer = model.tokenizer
    encoder = new_text_encoder(shape, tokenizer, config.embed, checkpoint.folder)[0] if can_embed(shape) else None
    masked_texts = new_masked_texts(tokenizer, shape.positions, checkpoint.folder) if has_masked_head(shape) else None
    return Service(
        model,
        serve,
        config.sample,
        name=(serve.model_name if beside is None else None) or find_model_name(checkpoint),
        step=checkpoint.step,
        template=template,
        generates=generates,
        text_encoder=encoder,
        masked_texts=masked_texts,
        metrics=Metrics() if beside is None else beside.metrics,
    )


def check_names(services: Sequence[Service]) -> None:
    """Make names unique: checkpoints of one run get their step as well. Raise if that is not enough."""
    counts = Counter(service.name for service in services)
    for service in services:
        if counts[service.name] > 1:
            service.name += f"-step-{service.step}"
    twice = [name for name, count in Counter(service.name for service in services).items() if count > 1]
    if twice:
        raise TextmillError(f"two models are named '{twice[0]}', after their folders; rename a folder")


class FollowedRun(NamedTuple):
    """A run that is still training, and the service of its newest checkpoint."""

    service: Service
    config: RunConfig


async def follow_run(models: ServedModels, run: FollowedRun) -> None:
    """Change to each newer checkpoint of a run, as soon as it is complete."""
    service, config = run
    while True:
        await asyncio.sleep(FOLLOW_SECONDS)
        try:
            checkpoints = await asyncio.to_thread(list_checkpoints, config.folder_of("train"))
            if max(checkpoints, default=0) > service.step:
                newer = await asyncio.to_thread(open_service, config, "latest", service)
                if newer.step > service.step:  # else the newest one is damaged
                    await models.replace(service, newer)
        except TextmillError as error:  # it may have been deleted meanwhile
            warn(f"--follow: {error}; trying again")


def find_model_name(checkpoint: Checkpoint) -> str:
    """Return the name of the run's folder, or of the model's own folder."""
    folder = checkpoint.folder.resolve()
    names = [one.name for one in (folder, *folder.parents)]
    return next((name for name in names if name and name != "run" and not name.startswith("step-")), "model")


def read_api_key(serve: ServeConfig) -> str | None:
    """Read the API key from the file or the environment; None if there is none."""
    if serve.key_file is None:
        key = os.environ.get(KEY_VARIABLE)
        where = f"environment variable {KEY_VARIABLE}"
        if key is None:
            return None
    else:
        where = f"serve.key_file: {serve.key_file}"
        try:
            lines = Path(serve.key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            raise TextmillError(f"{where}: cannot be read; give a text file whose first line is the key") from None
        key = lines[0] if lines else ""
    key = key.strip()
    if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
        raise TextmillError(
            f"{where}: is not a valid key; use {MIN_KEY_LENGTH} or more printable ASCII characters without spaces"
        )
    return key


def run(models: ServedModels, listening: socket.socket, followed: Sequence[FollowedRun] = ()) -> str:
    """Serve on a bound socket until SIGTERM, SIGHUP or ctrl-C; return what was wrong with a model then, or nothing.

    Of `followed` runs the newest checkpoint is served.
    """
    serve = models.config
    connections = raise_file_limit(max(MIN_CONNECTIONS, serve.slots + serve.queue))
    protocol: Any = partial(Connection, ConnectionPool(connections, READ_SECONDS, models.metrics))
    listening.listen(BACKLOG)  # clients may connect from here on; they wait in the backlog
    host, port = listening.getsockname()[:2]
    host_in_url = f"[{host}]" if ":" in host else host
    settings = uvicorn.Config(
        new_app(models),
        http=protocol,
        lifespan="off",
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=SEND_SECONDS,
        backlog=BACKLOG,
    )
    if models.key is None and host not in ("127.0.0.1", "::1"):
        warn(f"serve.host={serve.host}: anyone who can reach this machine can use the model; set serve.key_file")
    print(f"serving {models.title()} at http://{host_in_url}:{port}/ ; ctrl-C stops", flush=True)
    tune_interpreter()
    server = Server(settings, models, followed)
    # uvicorn raises the signal again after it has stopped. That would end the process as if it had been killed.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if signal.SIGHUP in handled_signals():  # a closed terminal stops it like SIGTERM; uvicorn does not know it
            signal.signal(signal.SIGHUP, lambda *_: server.handle_exit(signal.SIGTERM, None))
    with suppress(KeyboardInterrupt):
        server.run([listening])
    print("stopped", flush=True)
    return server.problem


class Server(uvicorn.Server):
    """uvicorn with a graceful shutdown: running texts have `serve.shutdown_grace` seconds to finish."""

    def __init__(self, config: uvicorn.Config, models: ServedModels, followed: Sequence[FollowedRun]) -> None:
        super().__init__(config)
        self.models = models
        self.followed = followed
        self.problem = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Connect to the model process, then listen."""
        await self.models.connect()
        self.following = [asyncio.create_task(follow_run(self.models, one)) for one in self.followed]
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running texts finish, and end the others with an error. Until then, reply to new requests with 503."""
        self.problem = self.models.problem()
        for task in self.following:
            task.cancel()
        closing = asyncio.create_task(self.models.close(self.models.config.shutdown_grace))
        while not closing.done() and not self.force_exit:
            await asyncio.wait({closing}, timeout=FORCE_EXIT_SECONDS)
        if not closing.done():  # a second ctrl-C
            await self.models.close(0)
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
