"""The model process of `textmill serve`: receives requests over a socket, sends text back, and exits with its parent.

python -m textmill.generation.worker FILE        FILE: file descriptor of the open socket
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EmbedConfig, EngineConfig, ServeConfig
from textmill.errors import EXIT_BUG, EXIT_DONE, EXIT_USER, TextmillError
from textmill.generation.embed import can_embed, new_text_encoder
from textmill.generation.fill import new_masked_texts
from textmill.generation.messages import (
    HEARTBEAT_SECONDS,
    MessageSocket,
    pack_chunk,
    replace_surrogates,
    tune_interpreter,
    unpack_request,
)
from textmill.generation.requests import ChunkDelivery, Done, Request, TextChunk
from textmill.models import has_masked_head, open_family, read_shape

if TYPE_CHECKING:
    from textmill.generation.encoder import EncoderThread
    from textmill.generation.scheduler import Scheduler


class Worker:
    """Runs a model for the parent process at the other end of a socket.

    Its threads: the main one sends heartbeats, `_read_commands` submits and cancels requests, and each of
    `model_threads` computes texts and sends their chunks after each step.
    """

    def __init__(self, parent: MessageSocket) -> None:
        self.parent, self._closing, self._grace = parent, threading.Event(), 0.0
        self._chunks, self._chunks_lock = list[list[Any]](), threading.Lock()
        self._cancel_by_number, self._running_lock = dict[int, Callable[[], None]](), threading.Lock()
        """How to cancel each running request, by the parent's number of it."""

    def run(self, settings: dict[str, Any]) -> int:
        """Open the model, work until the parent sends close, and return the exit code."""
        threading.Thread(target=self._read_commands, name="textmill-commands", daemon=True).start()
        try:
            self._open(settings)
        except TextmillError as error:
            self.parent.send({"refused": str(error)})
            return EXIT_USER
        tune_interpreter()
        self.parent.send({"positions": self.model_threads[0].positions})
        while not self._closing.wait(HEARTBEAT_SECONDS):
            self._send([])
        for thread in self.model_threads:
            thread.close(self._grace)
        return EXIT_DONE

    def _open(self, settings: dict[str, Any]) -> None:
        engine = TypeAdapter[EngineConfig](EngineConfig).validate_python(settings["engine"])
        checkpoint = Checkpoint(Path(settings["folder"]), 0, {})
        serve = ServeConfig.model_validate(settings["serve"])
        embed = EmbedConfig.model_validate(settings["embed"])
        for path in settings["family_files"]:  # the user named them to the parent
            open_family(path)
        scheduler, encoder = open_served_model(checkpoint, engine, serve, embed, self._after_step)
        self.chunk_delivery = None if scheduler is None else ChunkDelivery(scheduler)
        self.encoder = encoder
        self.model_threads = [thread for thread in (scheduler, encoder) if thread is not None]
        """Each runs the model in a thread of its own."""

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

    def _submit(self, number: int, packed: list[Any], seconds: float | None, streamed: bool) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            request = unpack_request(packed)
            deliver = partial(self._deliver, number)
            target: Any = self.chunk_delivery if isinstance(request, Request) else self.encoder
            if target is None:
                raise TextmillError("the model cannot do this")
            with self._running_lock:  # `deliver` may be called with the end before `submit` returns
                self._cancel_by_number[number] = partial(
                    target.cancel, target.submit(request, deliver, deadline, streamed)
                )
        except Exception as error:
            done = Done("error", 0, "", f"the model process refused the request: {error}")
            self._send([pack_chunk(number, TextChunk("", done=done))])

    def _cancel(self, number: int) -> None:
        cancel = self._cancel_by_number.get(number)
        if cancel is not None:  # else it has ended
            cancel()

    def _close(self, grace: float) -> None:
        """Start closing; a second command with a shorter grace ends the requests earlier."""
        for thread in self.model_threads:
            thread.start_closing(grace)
        self._grace = grace
        self._closing.set()

    def _deliver(self, number: int, chunk: TextChunk) -> None:
        with self._chunks_lock:
            self._chunks.append(pack_chunk(number, chunk))
        if chunk.done is not None:
            with self._running_lock:
                del self._cancel_by_number[number]

    def _after_step(self) -> None:
        if self._chunks:
            # Sent under the lock: the chunks of one text must arrive in order, whichever thread sends them.
            with self._chunks_lock:
                chunks = self._chunks
                self._chunks = []
                self._send(chunks)

    def _send(self, chunks: list[list[Any]]) -> None:
        """Send the state (also the heartbeat) and new chunks. `_read_commands` notices a parent that is gone."""
        stats = [thread.stats() for thread in self.model_threads]
        tokens = sum(counts["tokens"] for counts in stats)
        cancelled = sum(counts["cancelled"] for counts in stats)
        step_seconds = max(thread.step_seconds() for thread in self.model_threads)
        problems = [thread.problem(float("inf")) for thread in self.model_threads]
        problem = next((text for text in problems if text), "")
        with suppress(OSError):
            self.parent.send([tokens, cancelled, step_seconds, replace_surrogates(problem), chunks])


def open_served_model(
    checkpoint: Checkpoint, engine: EngineConfig, serve: ServeConfig, embed: EmbedConfig, after_step: Callable[[], None]
) -> tuple[Scheduler | None, EncoderThread | None]:
    """Load a checkpoint once: a scheduler that generates text, an encoder for embeddings and masks, or both.

    What both compute with, they use in turns.
    """
    # Loading torch takes seconds. The command thread already runs, so a parent that dies now is noticed.
    from textmill.generation.encoder import Embedder, EncoderThread, Filler, open_embedder
    from textmill.generation.scheduler import Turns, open_scheduler

    turns = Turns()
    where = str(checkpoint.folder)
    shape = read_shape(checkpoint.folder)
    limits = {"slots": serve.slots, "queue": serve.queue}
    if open_family(shape.family).OBJECTIVE == "masked":
        embedder = open_embedder(checkpoint, engine, embed)
        net = embedder.net
        tokenizer = embedder.texts.tokenizer
        texts = new_masked_texts(tokenizer, shape.positions, where) if has_masked_head(shape) else None
        filler = None if texts is None else Filler(net, texts)
        return None, EncoderThread(embedder, filler, turns=turns, after_step=after_step, **limits)
    scheduler = open_scheduler(checkpoint, engine, serve, after_step, turns)
    if not can_embed(shape):
        return scheduler, None
    generator = scheduler.generator
    encoder, pooling = new_text_encoder(shape, generator.tokenizer, embed, checkpoint.folder)
    embedder = Embedder(generator.net, encoder, pooling, where)
    return scheduler, EncoderThread(embedder, None, turns=turns, after_step=after_step, **limits)


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
