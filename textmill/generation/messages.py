"""Messages between the HTTP process and the model process: JSON over a socket, each with its length in front."""

from __future__ import annotations

import gc
import socket
import struct
import sys
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from pydantic_core import from_json, to_json

from textmill.config import SampleConfig
from textmill.generation.requests import Done, Request
from textmill.generation.text_chunks import TextChunk

HEARTBEAT_SECONDS = 0.5
"""Longest time between two messages of a healthy model process."""
SWITCH_SECONDS = 0.0001
"""Python's thread switch interval. The default of 5 ms delays every reply."""
GC_THRESHOLD = 20_000
"""New objects between two garbage collections. Python's default of 700 costs a fifteenth of a request's time."""

SIZE = struct.Struct("!Q")


class MessageSocket:
    """One end of the socket. Many threads may send; one thread receives."""

    def __init__(self, file: int) -> None:
        self.socket, self._send_lock = socket.socket(fileno=file), threading.Lock()
        self._incoming = self.socket.makefile("rb")

    def send(self, message: Any) -> None:
        """Send a list or an object; raise OSError if the other end is gone."""
        packed = pack_message(message)
        with self._send_lock:
            self.socket.sendall(packed)

    def receive(self) -> Any:
        """Return the next message; raise EOFError or OSError if the other end is gone."""
        [size] = SIZE.unpack(self._read(SIZE.size))
        return from_json(self._read(size))

    def _read(self, count: int) -> bytes:
        found = self._incoming.read(count)
        if len(found) < count:
            raise EOFError
        return found


class SendQueue:
    """Sends messages without blocking: what the socket does not take at once is sent by a thread, in order.

    While a socket has a SendQueue, nothing else may send on it.
    """

    def __init__(self, sender: MessageSocket) -> None:
        self._socket, self._delayed = sender.socket, SimpleQueue[bytes | None]()
        self._delayed_count, self._send_lock = 0, threading.Lock()
        threading.Thread(target=self._send_delayed, name="textmill-send", daemon=True).start()

    def put(self, message: Any) -> None:
        """Send a list or an object. Nothing happens if the other end is gone: the receiving thread notices that."""
        packed = pack_message(message)
        with self._send_lock, suppress(OSError):
            if not self._delayed_count:
                with suppress(BlockingIOError):
                    packed = packed[self._socket.send(packed, socket.MSG_DONTWAIT) :]
            if packed:
                self._delayed_count += 1
                self._delayed.put(packed)

    def close(self) -> None:
        """Stop the sending thread."""
        self._delayed.put(None)

    def _send_delayed(self) -> None:
        with suppress(OSError):
            while (packed := self._delayed.get()) is not None:
                self._socket.sendall(packed)
                with self._send_lock:
                    self._delayed_count -= 1


def pack_message(message: Any) -> bytes:
    """Return a list or an object as bytes: length, then JSON."""
    text = to_json(message)
    return SIZE.pack(len(text)) + text


def tune_interpreter() -> None:
    """Prepare a process for serving: short thread switches, and garbage collection that rarely runs.

    Objects that exist now are never collected again. Scanning them would stop every text for a tenth of a second.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def new_socket_pair() -> tuple[MessageSocket, socket.socket]:
    """Return this process's end, and the end to pass to a child process."""
    ours, theirs = socket.socketpair()
    return MessageSocket(ours.detach()), theirs


def pack_request(request: Request) -> list[Any]:
    """Return a request as lists and numbers; of its settings, only those that differ from the default."""
    sample = request.sample.model_dump(exclude_defaults=True)
    return [request.ids, sample, request.stop, request.stop_ids, request.bias, request.logprobs, request.echo]


def unpack_request(packed: list[Any]) -> Request:
    """Undo `pack_request`."""
    ids, sample, stop, stop_ids, bias, logprobs, echo = packed
    pairs = tuple((id_, value) for id_, value in bias)
    return Request(tuple(ids), SampleConfig.model_validate(sample), tuple(stop), tuple(stop_ids), pairs, logprobs, echo)


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded as UTF-8."""
    return text.encode("utf-8", "replace").decode()


def pack_chunk(number: int, chunk: TextChunk) -> list[Any]:
    """Return a chunk and its request's number as lists and numbers."""
    done = chunk.done
    end = None if done is None else [done.reason, done.tokens, replace_surrogates(done.message), done.prompt_logprobs]
    return [number, chunk.text, chunk.logprobs, end]


def unpack_chunk(packed: list[Any]) -> tuple[int, TextChunk]:
    """Undo `pack_chunk`."""
    number, text, logprobs, end = packed
    if end is None:
        return number, TextChunk(text, logprobs)
    reason, tokens, message, prompt_logprobs = end
    return number, TextChunk(text, logprobs, Done(reason, tokens, "", message, prompt_logprobs))
