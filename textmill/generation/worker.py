"""The process that has the model: takes requests from the one that started it, sends texts back, and ends when that one is gone.

python -m textmill.generation.worker FILE        FILE: the number of an open socket
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EngineConfig, ServeConfig
from textmill.errors import EXIT_DONE, EXIT_USER, TextmillError
from textmill.generation.messages import (
    HEARTBEAT_SECONDS,
    MessageSocket,
    pack_chunk,
    replace_surrogates,
    request_of,
    tune_interpreter,
)
from textmill.generation.requests import Done
from textmill.generation.text_chunks import ChunkingScheduler, TextChunk


class Worker:
    """A scheduler at the other end of a line."""

    def __init__(self, line: MessageSocket) -> None:
        self.line, self._closing, self._grace = line, threading.Event(), 0.0
        self._parts: list[list[Any]] = []
        self._numbers, self._naming = dict[int, int](), threading.Lock()
        """The scheduler's number of each request at work, by the number that it came with."""

    def live(self, asked: dict[str, Any]) -> int:
        """Open the model, work until told to close; the exit code."""
        threading.Thread(target=self._obey, name="textmill-orders", daemon=True).start()
        try:
            self._open(asked)
        except TextmillError as error:
            self.line.send({"refused": str(error)})
            return EXIT_USER
        tune_interpreter()
        self.line.send({"positions": self.scheduler.positions})
        while not self._closing.wait(HEARTBEAT_SECONDS):
            self._send([])
        self.inner.close(self._grace)
        return EXIT_DONE

    def _open(self, asked: dict[str, Any]) -> None:
        from textmill.generation.scheduler import (
            open_scheduler,
        )  # the watch over the line begins before torch is loaded

        engine = TypeAdapter[EngineConfig](EngineConfig).validate_python(asked["engine"])
        checkpoint = Checkpoint(Path(asked["folder"]), 0, {})
        self.inner = open_scheduler(checkpoint, engine, ServeConfig.model_validate(asked["serve"]), self._after_step)
        self.scheduler = ChunkingScheduler(self.inner)

    def _obey(self) -> None:
        """Do what comes; when nobody is there to send any more, nobody waits for a text either."""
        orders: dict[str, Callable[..., None]] = {"submit": self._submit, "cancel": self._cancel, "close": self._close}
        try:
            while True:
                order, *given = self.line.receive()
                orders[order](*given)
        except (EOFError, OSError):
            os._exit(EXIT_DONE)

    def _submit(self, number: int, packed: list[Any], seconds: float | None, streamed: bool) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            with self._naming:  # a text may be over before its number is known
                self._numbers[number] = self.scheduler.submit(
                    request_of(packed), partial(self._deliver, number), deadline, streamed
                )
        except Exception as error:
            self._send([pack_chunk(number, TextChunk("", done=Done("error", 0, "", f"the model refused it: {error}")))])

    def _cancel(self, number: int) -> None:
        if (known := self._numbers.get(number)) is not None:
            self.scheduler.cancel(known)

    def _close(self, grace: float) -> None:
        self._grace = grace
        self._closing.set()

    def _deliver(self, number: int, part: TextChunk) -> None:
        self._parts.append(pack_chunk(number, part))
        if part.done is not None:
            with self._naming:
                del self._numbers[number]

    def _after_step(self) -> None:
        if self._parts:
            parts, self._parts = self._parts, []
            self._send(parts)

    def _send(self, parts: list[list[Any]]) -> None:
        """Tell how it goes, and what has come; whether anybody is there is `_obey`'s to find out."""
        stats = self.inner.stats()
        with suppress(OSError):
            self.line.send(
                [
                    stats["tokens"],
                    stats["cancelled"],
                    self.inner.stuck(),
                    replace_surrogates(self.inner.problem(float("inf"))),
                    parts,
                ]
            )


def main() -> None:
    """Work for whoever holds the other end."""
    # Signals of the terminal and of service managers reach every process; when to end is for the one in front to say.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    line = MessageSocket(int(sys.argv[1]))
    code = Worker(line).live(line.receive())
    os._exit(code)  # whatever a thread is stuck in


if __name__ == "__main__":
    main()
