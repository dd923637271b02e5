"""Runs the model in a process of its own, so that it and the HTTP server do not share one interpreter."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EmbedConfig, EngineConfig, ServeConfig
from textmill.errors import EXIT_BUG, AlreadyReported, TextmillError, warn
from textmill.generation.requests import (
    LENGTH_PREFIX,
    DeliverChunk,
    Done,
    EncoderRequest,
    MemoryShort,
    MessageSocket,
    ModelStats,
    QueueFull,
    Request,
    TextChunk,
    describe_hang,
    max_new_tokens_served,
    new_socket_pair,
    pack_message,
    unpack_chunk,
)
from textmill.models import read_shape
from textmill.models.family_files import loaded_family_files
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

STDERR = 2
EXIT_SECONDS = 10.0
"""Time after the grace in which the model process must exit by itself."""
RESTART_SECONDS = (0, 1, 2, 4, 8)
"""How long to wait before each restart in a row. The row ends when the model answers a request."""
SILENT_SECONDS = 2.0
"""A longer time without a heartbeat counts as time of the current step."""


class ModelProcess:
    """The model in another process. Every accepted request gets exactly one Done, even if that process dies.

    `start` it, then `connect` to it in the event loop, where everything else happens; or `load` it there. A process
    that dies is started again.
    """

    def __init__(self, tokenizer: TextTokenizer, positions: int, serve: ServeConfig, settings: dict[str, Any]) -> None:
        self.settings = settings
        """What the process is started with."""
        self.vocab = tokenizer.vocab
        self.positions = positions
        self.tokenizer = tokenizer
        self.slots = serve.slots
        self.queue = serve.queue
        self.process: subprocess.Popen[bytes]
        self._worker: MessageSocket
        self._writer: asyncio.StreamWriter
        self._running: asyncio.Task[None] | None = None
        """Reads what the process sends, and restarts it; None before `connect`."""
        self._in_flight: dict[int, DeliverChunk] = {}
        self._stats = ModelStats(0, 0, serve.slots, serve.queue)
        self._last_heartbeat = time.monotonic()
        self._step_seconds = 0.0
        self._problem = ""
        self._restarts = 0
        """Restarts in a row."""
        self._closing = False
        self._close_requested = asyncio.Event()
        self._exited = True

    @property
    def loaded(self) -> bool:
        """Whether there is a process, or one that is being restarted."""
        return self._running is not None and not self._running.done()

    def start(self) -> None:
        """Start the process and wait until it is ready; its user errors are raised here."""
        self.process, self._worker = spawn()
        load_model(self._worker, self.process, self.settings)

    async def connect(self) -> None:
        """Start to read what the process sends; must be called before the first request."""
        self._running = asyncio.create_task(self._run(await self._open()))

    async def load(self) -> None:
        """Start the process and connect to it."""
        await asyncio.to_thread(self.start)
        await self.connect()

    async def unload(self) -> None:
        """End the process, which must have no requests; it can be loaded again."""
        await self.close(0)
        self._closing = False
        self._close_requested.clear()

    async def _open(self) -> asyncio.StreamReader:
        """Open the connection to a new process."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._worker.socket)
        self._last_heartbeat = time.monotonic()
        self._step_seconds = 0.0
        self._problem = ""
        self._exited = False
        return reader

    def submit(
        self,
        request: Request | EncoderRequest,
        deliver: DeliverChunk,
        deadline: float | None = None,
        streamed: bool = False,
    ) -> int:
        """Queue a request and return its number.

        `deliver` is called for each chunk; the last chunk has Done. `deadline` is a `time.monotonic()` time. Raises
        QueueFull, or TextmillError if the request cannot be done.
        """
        if isinstance(request, Request):
            max_new_tokens_served(request, self.positions, self.vocab)
        if self._closing:
            raise TextmillError("the server is closing; send the request again when it is back")
        if self._exited:
            raise TextmillError(self._problem)
        if len(self._in_flight) >= self.slots + self.queue:
            raise QueueFull
        seconds = None if deadline is None else deadline - time.monotonic()
        number = self._stats.requests + 1
        self._send(["submit", number, request, seconds, streamed])
        self._stats.requests = number
        self._in_flight[number] = deliver
        return number

    def cancel(self, number: int) -> None:
        """End a request before the next step; nothing happens if it has ended already."""
        if number in self._in_flight:
            self._send(["cancel", number])

    def _send(self, message: Any) -> None:
        """Send without waiting: asyncio keeps what the process does not read yet. `_read` notices a dead process."""
        packed = pack_message(message)
        if not self._writer.is_closing():
            self._writer.write(packed)

    def stats(self) -> ModelStats:
        """Return what the process does and has done."""
        active = min(len(self._in_flight), self.slots)
        return replace(self._stats, active=active, waiting=len(self._in_flight) - active)

    def problem(self, max_step_seconds: float) -> str:
        """Describe what is wrong with the model; empty if nothing is."""
        if self._closing:
            return ""
        if self._problem:
            return self._problem
        silent = time.monotonic() - self._last_heartbeat
        step_seconds = self._step_seconds + (silent if silent > SILENT_SECONDS else 0.0)
        return describe_hang(step_seconds) if step_seconds > max_step_seconds else ""

    async def close(self, grace: float) -> None:
        """Accept nothing more; let requests finish for `grace` seconds, then end them. The process has exited after.

        A second call may shorten the grace.
        """
        self._closing = True
        self._close_requested.set()
        if not self._exited:
            self._send(["close", grace])
        elif hasattr(self, "process"):  # it may be loading the model
            self.process.kill()
        if self._running is None:
            return
        await asyncio.wait({self._running}, timeout=grace + EXIT_SECONDS)
        if not self._running.done():
            self.process.kill()
            await self._running

    async def _run(self, reader: asyncio.StreamReader | None) -> None:
        """Read what the process sends until it exits; start it again, unless the server closes."""
        while reader is not None:
            exit_status = await self._read(reader)
            self._exited = True
            self._end_all(exit_status)
            reader = await self._restart(exit_status)

    async def _restart(self, exit_status: str) -> asyncio.StreamReader | None:
        """Start the process again; None if the server closes, or after too many restarts in a row."""
        while not self._close_requested.is_set() and self._restarts < len(RESTART_SECONDS):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._close_requested.wait(), RESTART_SECONDS[self._restarts])
            self._restarts += 1
            if self._close_requested.is_set():
                return None
            try:
                await asyncio.to_thread(self.start)
                reader = await self._open()
            except (TextmillError, OSError) as error:
                warn(f"the model's process cannot be started again: {error}")
                continue
            if self._close_requested.is_set():
                self._send(["close", 0])
            warn("the model's process has been started again")
            return reader
        if not self._close_requested.is_set():
            self._problem = f"the model's process has died ({exit_status}), and restarts failed; restart the server"
            warn(self._problem)
        return None

    async def _read(self, reader: asyncio.StreamReader) -> str:
        """Receive chunks until the process exits, and return how; a process that sends anything else is killed."""
        try:
            while True:
                [size] = LENGTH_PREFIX.unpack(await reader.readexactly(LENGTH_PREFIX.size))
                self._receive(*from_json(await reader.readexactly(size)))
        except (EOFError, OSError):
            pass
        except Exception as error:
            warn(f"a message of the model's process cannot be read ({type(error).__name__}: {error})")
            self.process.kill()
        exit_status = await asyncio.to_thread(wait_for_exit, self.process)
        self._writer.close()
        return exit_status

    def _receive(self, tokens: int, cancelled: int, step_seconds: float, problem: str, chunks: list[list[Any]]) -> None:
        """Note the state of the model process, and pass its chunks on."""
        self._stats.tokens = tokens
        self._stats.cancelled = cancelled
        self._step_seconds = step_seconds
        self._problem = problem
        self._last_heartbeat = time.monotonic()
        for packed in chunks:
            number, chunk = unpack_chunk(packed)
            deliver = self._in_flight.pop(number, None) if chunk.done else self._in_flight.get(number)
            if deliver is not None:
                deliver(chunk)
            if chunk.done and chunk.done.reason != "error":
                self._restarts = 0

    def _end_all(self, exit_status: str) -> None:
        """The process has exited: end all requests."""
        done = Done("cancelled", 0, "")
        if not self._closing:
            self._problem = f"the model's process has died ({exit_status}) and is being restarted; try again soon"
            warn(self._problem)
            done = Done("error", 0, "", self._problem)
        in_flight = self._in_flight
        self._in_flight = {}
        for deliver in in_flight.values():
            deliver(TextChunk("", done=done))


def wait_for_exit(process: subprocess.Popen[bytes]) -> str:
    """Wait for a process that has closed its socket; return its exit code or signal."""
    try:
        code = process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def new_model_process(
    checkpoint: Checkpoint, engine: EngineConfig, serve: ServeConfig, embed: EmbedConfig
) -> ModelProcess:
    """Return the model process of a checkpoint, which is not started yet."""
    settings = {
        "folder": str(checkpoint.folder),
        "engine": engine.model_dump(mode="json"),
        "serve": serve.model_dump(mode="json"),
        "embed": embed.model_dump(mode="json"),
        "family_files": loaded_family_files(),
    }
    positions: int = read_shape(checkpoint.folder).positions
    return ModelProcess(open_tokenizer(checkpoint.tokenizer), positions, serve, settings)


def spawn() -> tuple[subprocess.Popen[bytes], MessageSocket]:
    """Start a process that waits for its settings; return it and the socket to it."""
    worker, theirs = new_socket_pair()
    # The child imports what this process imports, and nothing from the current folder.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "textmill.generation.worker", str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
            start_new_session=True,  # ctrl-C reaches this process only, which then closes the worker
        )
    return process, worker


def load_model(worker: MessageSocket, process: subprocess.Popen[bytes], settings: dict[str, Any]) -> None:
    """Let the process load the model, and wait until it is ready."""
    try:
        worker.send(settings)
        reply = worker.receive()
    except (EOFError, OSError):
        raise _start_error(process) from None
    except BaseException:
        process.kill()
        process.wait()
        raise
    if "refused" in reply:
        process.wait()
        raise (MemoryShort if reply["memory"] else TextmillError)(reply["refused"])


def _start_error(process: subprocess.Popen[bytes]) -> TextmillError:
    """Return the error for a process that exited before it was ready; a bug has printed its own traceback."""
    exit_status = wait_for_exit(process)
    if process.returncode >= 0:
        return AlreadyReported(EXIT_BUG)
    return MemoryShort(
        f"the model's process was killed by {exit_status} while it loaded the model; check that there is enough memory"
    )
