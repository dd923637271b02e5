"""The model process of `textmill serve`: receives requests over a socket, sends text back, and exits with its parent.

python -m textmill.generation.worker FILE        FILE: file descriptor of the open socket
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EmbedConfig, EngineConfig, ServeConfig
from textmill.errors import EXIT_BUG, EXIT_DONE, EXIT_USER, TextmillError
from textmill.generation.requests import (
    HEARTBEAT_SECONDS,
    DeliverChunk,
    Done,
    MemoryShort,
    MessageSocket,
    Request,
    TextChunk,
    Token,
    TokenLogprob,
    pack_chunk,
    replace_surrogates,
    unpack_request,
)
from textmill.models import open_family

CHUNK_SECONDS = 0.02
"""Time between two chunks of a streamed text: continuous for a reader, and few messages even at 100,000 tokens/s."""
THREAD_SWITCH_SECONDS = 0.0001
"""How long a thread may hold the interpreter lock (GIL). Python's default of 5 ms delays every reply."""
GC_THRESHOLD = 20_000
"""New objects between two garbage collections. Python's default of 700 costs a fifteenth of a request's time."""


class Worker:
    """Runs a model for the parent process at the other end of a socket.

    Its threads: the main one sends heartbeats, `_read_commands` submits and cancels requests, and the scheduler's
    computes texts and sends their chunks after each step.
    """

    def __init__(self, parent: MessageSocket) -> None:
        self.parent = parent
        self._closing = threading.Event()
        self._grace = 0.0
        self._chunks: list[list[Any]] = []
        self._chunks_lock = threading.Lock()
        self._running_lock = threading.Lock()
        self._own_numbers: dict[int, int] = {}
        """The scheduler's number of each running request, by the parent's."""

    def run(self, settings: dict[str, Any]) -> int:
        """Open the model, work until the parent sends close, and return the exit code."""
        threading.Thread(target=self._read_commands, name="textmill-commands", daemon=True).start()
        try:
            self._open(settings)
        except (TextmillError, RuntimeError) as error:
            out_of_memory = isinstance(error, MemoryShort) or type(error).__name__ == "OutOfMemoryError"  # torch's
            if not isinstance(error, TextmillError) and not out_of_memory:
                raise
            self.parent.send({"refused": str(error), "memory": out_of_memory})
            return EXIT_USER
        tune_interpreter()
        self.parent.send({"ready": True})
        while not self._closing.wait(HEARTBEAT_SECONDS):
            self._send([])
        self.scheduler.close(self._grace)
        return EXIT_DONE

    def _open(self, settings: dict[str, Any]) -> None:
        engine = TypeAdapter[EngineConfig](EngineConfig).validate_python(settings["engine"])
        checkpoint = Checkpoint(Path(settings["folder"]), 0, {})
        serve = ServeConfig.model_validate(settings["serve"])
        embed = EmbedConfig.model_validate(settings["embed"])
        for path in settings["family_files"]:  # the user named them to the parent
            open_family(path)
        # Loading torch takes seconds. The command thread already runs, so a parent that dies now is noticed.
        from textmill.generation.scheduler import open_scheduler

        self.scheduler = open_scheduler(checkpoint, engine, serve, embed, self._after_step)

    def _read_commands(self) -> None:
        """Run the parent's commands; exit the process when the parent is gone, or when no command can be read."""
        commands: dict[str, Callable[..., None]] = {
            "submit": self._submit,
            "cancel": self._cancel,
            "close": self._close,
        }
        try:
            while True:
                name, *arguments = self.parent.receive()
                commands[name](*arguments)
        except (EOFError, OSError):
            os._exit(EXIT_DONE)
        except BaseException:
            traceback.print_exc()
            os._exit(EXIT_BUG)

    def _submit(self, number: int, packed: dict[str, Any], seconds: float | None, streamed: bool) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            request = unpack_request(packed)
            with_logprobs = isinstance(request, Request) and bool(request.logprobs)
            collector = ChunkCollector(partial(self._deliver, number), with_logprobs, streamed)
            with self._running_lock:  # the end may be delivered before `submit` returns
                self._own_numbers[number] = self.scheduler.submit(request, collector, deadline)
        except Exception as error:
            done = Done("error", 0, "", f"the model process refused the request: {error}")
            self._send([pack_chunk(number, TextChunk("", done=done))])

    def _cancel(self, number: int) -> None:
        own_number = self._own_numbers.get(number)
        if own_number is not None:  # else it has ended
            self.scheduler.cancel(own_number)

    def _close(self, grace: float) -> None:
        """Start closing; a second command with a shorter grace ends the requests earlier."""
        self.scheduler.start_closing(grace)
        self._grace = grace
        self._closing.set()

    def _deliver(self, number: int, chunk: TextChunk) -> None:
        with self._chunks_lock:
            self._chunks.append(pack_chunk(number, chunk))
        if chunk.done is not None:
            with self._running_lock:
                del self._own_numbers[number]

    def _after_step(self) -> None:
        if self._chunks:
            # Sent under the lock: the chunks of one text must arrive in order, whichever thread sends them.
            with self._chunks_lock:
                chunks = self._chunks
                self._chunks = []
                self._send(chunks)

    def _send(self, chunks: list[list[Any]]) -> None:
        """Send the state (also the heartbeat) and new chunks. `_read_commands` notices a parent that is gone."""
        stats = self.scheduler.stats()
        problem = replace_surrogates(self.scheduler.problem(float("inf")))
        with suppress(OSError):
            self.parent.send([stats.tokens, stats.cancelled, self.scheduler.step_seconds(), problem, chunks])


class ChunkCollector:
    """Receives the events of one request and passes them on as chunks."""

    def __init__(self, deliver: DeliverChunk, with_logprobs: bool, streamed: bool) -> None:
        self._deliver = deliver
        self._with_logprobs = with_logprobs
        self._streamed = streamed
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._last_tick = -1

    def __call__(self, event: Token | Done) -> None:
        """Receive a token, or the end."""
        if event.text:
            self._texts.append(event.text)
        if isinstance(event, Done):
            self._flush(event)
            return
        if self._with_logprobs:
            self._logprobs.append((event.id, event.logprob, event.top))
        # All requests flush at the same clock ticks, so that their chunks can share one message.
        if self._streamed and (self._texts or self._logprobs) and self._is_new_tick():
            self._flush(None)

    def _is_new_tick(self) -> bool:
        before = self._last_tick
        self._last_tick = int(time.monotonic() / CHUNK_SECONDS)
        return self._last_tick != before

    def _flush(self, done: Done | None) -> None:
        texts = self._texts
        self._texts = []
        logprobs = self._logprobs
        self._logprobs = []
        self._deliver(TextChunk("".join(texts), logprobs, done))


def tune_interpreter() -> None:
    """Reduce latency in a serving process: frequent thread switches, rare garbage collection.

    Objects that exist now are excluded from garbage collection: scanning them would pause all requests for 0.1 s.
    """
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def main() -> None:
    """Run a worker for the process that holds the other end of the socket."""
    # Terminals and service managers signal every process of a group. The parent decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = MessageSocket(int(sys.argv[1]))
    code = Worker(parent).run(parent.receive())
    os._exit(code)  # even if a thread hangs


if __name__ == "__main__":
    main()
