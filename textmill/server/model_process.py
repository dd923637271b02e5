"""RemoteScheduler: the scheduler in a process of its own, so that the model and the clients do not share one interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EngineConfig, ServeConfig
from textmill.errors import EXIT_BUG, AlreadyReported, TextmillError, warn
from textmill.generation.messages import MessageSocket, SendQueue, new_socket_pair, pack_request, unpack_chunk
from textmill.generation.requests import Done, QueueFull, Request, describe_hang, max_new_tokens_served
from textmill.generation.text_chunks import DeliverChunk, TextChunk
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

STDERR = 2
AFTER = 10.0
"""Seconds after the grace in which the model's process must have ended by itself."""
SILENT = 2.0
"""Seconds without a word from the model's process from which on they count as time of its step."""


class RemoteScheduler:
    """Stands for a scheduler that works in another process: counts what was asked, and gives everyone one end whatever happens there."""

    def __init__(
        self,
        line: MessageSocket,
        process: subprocess.Popen[bytes],
        tokenizer: TextTokenizer,
        positions: int,
        serve: ServeConfig,
    ) -> None:
        self.vocab, self.positions, self.tokenizer = tokenizer.vocab, positions, tokenizer
        self.slots, self.queue, self.process = serve.slots, serve.queue, process
        self._line, self._orders = line, SendQueue(line)
        self._change = threading.Lock()
        self._flying: dict[int, DeliverChunk] = {}
        self._requests = self._tokens = self._cancelled = 0
        self._heard, self._stuck, self._problem = time.monotonic(), 0.0, ""
        self._closing = self._over = False
        self._reader = threading.Thread(target=self._read, name="textmill-texts", daemon=True)
        self._reader.start()

    def submit(
        self, request: Request, deliver: DeliverChunk, deadline: float | None = None, streamed: bool = False
    ) -> int:
        """Queue a request; its number. `deliver` is called from a thread of ours for each part, the last of which has the end.

        `deadline` is a time of `time.monotonic()`. Raises QueueFull, or TextmillError for what cannot be done.
        """
        max_new_tokens_served(request, self.positions, self.vocab)
        with self._change:
            if self._closing:
                raise TextmillError("the server is closing; ask again when it is back")
            if self._over:
                raise TextmillError(self._problem)
            if len(self._flying) >= self.slots + self.queue:
                raise QueueFull
            self._requests += 1
            number = self._requests
            self._flying[number] = deliver
        seconds = None if deadline is None else deadline - time.monotonic()
        self._orders.put(["submit", number, pack_request(request), seconds, streamed])
        return number

    def cancel(self, number: int) -> None:
        """End a request between this step and the next; one that is over already is left alone."""
        if number in self._flying:
            self._orders.put(["cancel", number])

    def stats(self) -> dict[str, int | float]:
        """How much is going on."""
        with self._change:
            active = min(len(self._flying), self.slots)
            return {
                "active": active, "waiting": len(self._flying) - active, "slots": self.slots, "queue": self.queue,
                "tokens": self._tokens, "requests": self._requests, "cancelled": self._cancelled,
            }  # fmt: skip

    def problem(self, patience: float) -> str:
        """What is wrong with the model, in words; empty: nothing. A step may take `patience` seconds."""
        with self._change:
            silent = time.monotonic() - self._heard
            stuck = self._stuck + (silent if silent > SILENT else 0.0)
            if self._closing:
                return ""
            return self._problem or (describe_hang(stuck) if stuck > patience else "")

    def close(self, grace: float) -> None:
        """Take nothing more; what was taken may finish within so many seconds and is ended then. No process is left behind."""
        with self._change:
            self._closing = True
        self._orders.put(["close", grace])
        self._reader.join(grace + AFTER)
        if self._reader.is_alive():
            self.process.kill()
            self._reader.join()

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._take(*self._line.receive())
        self._end()

    def _take(self, tokens: int, cancelled: int, stuck: float, problem: str, parts: list[list[Any]]) -> None:
        come = [unpack_chunk(part) for part in parts]
        with self._change:
            self._tokens, self._cancelled, self._stuck, self._problem = tokens, cancelled, stuck, problem
            self._heard = time.monotonic()
            readers = [(self._flying.pop if part.done else self._flying.get)(number, None) for number, part in come]
        for deliver, (number, part) in zip(readers, come, strict=True):
            self._tell(number, deliver, part)

    def _tell(self, number: int, deliver: DeliverChunk | None, part: TextChunk) -> None:
        """Hand over what there is; one who cannot take it is taken for gone."""
        try:
            if deliver is not None:
                deliver(part)
        except Exception as error:
            warn(f"request {number}: its reader failed ({type(error).__name__}); it is cancelled")
            self.cancel(number)

    def _end(self) -> None:
        """The process is gone: those who wait are told, and nobody else is let in."""
        code = ended(self.process)
        self._orders.close()
        with self._change:
            self._over, left = True, self._flying
            self._flying = {}
            if not self._closing:
                self._problem = f"the model's process has died ({code}); restart the server"
        done = Done("cancelled", 0, "") if self._closing else Done("error", 0, "", self._problem)
        if not self._closing:
            warn(self._problem)
        for number, deliver in left.items():
            self._tell(number, deliver, TextChunk("", done=done))


def ended(process: subprocess.Popen[bytes]) -> str:
    """How a process ended that has let go of its line."""
    try:
        code = process.wait(AFTER)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def open_remote_scheduler(checkpoint: Checkpoint, engine: EngineConfig, serve: ServeConfig) -> RemoteScheduler:
    """A checkpoint in the memory of a process of its own, ready for requests; what it refuses is refused here."""
    tokenizer = open_tokenizer(checkpoint.tokenizer)
    line, theirs = new_socket_pair()
    # What this process can import, and nothing that happens to lie in the folder it was started in.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "textmill.generation.worker", str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
            start_new_session=True,  # a terminal's ctrl-C is for the one in front, who says when the model ends
        )
    try:
        asked = {
            "folder": str(checkpoint.folder),
            "engine": engine.model_dump(mode="json"),
            "serve": serve.model_dump(mode="json"),
        }
        line.send(asked)
        told = line.receive()
    except (EOFError, OSError):
        raise _unopened(process) from None
    except BaseException:
        process.kill()
        process.wait()
        raise
    if "refused" in told:
        process.wait()
        raise TextmillError(told["refused"])
    return RemoteScheduler(line, process, tokenizer, told["positions"], serve)


def _unopened(process: subprocess.Popen[bytes]) -> TextmillError:
    """Why there is no model: a bug, of which the process has told itself, or somebody ended it."""
    how = ended(process)
    if process.returncode >= 0:
        return AlreadyReported(EXIT_BUG)
    return TextmillError(
        f"the model's process was ended by {how} while it was opening; see whether there is memory enough"
    )
