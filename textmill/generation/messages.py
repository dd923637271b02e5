"""How requests and texts travel between the process that speaks HTTP and the one that has the model: JSON, a length before each."""

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
"""Seconds between two words of a process that is well, at most."""
TURN = 0.0001
"""Seconds that one thread may keep the interpreter while another wants it; Python's own 5 ms make every answer wait."""

RARELY = 20_000
"""New objects at least between two searches for garbage; to search after 700, as Python does, takes a fifteenth of a request's time."""

SIZE = struct.Struct("!Q")


class MessageSocket:
    """One end of what connects the two; many threads may send, one receives."""

    def __init__(self, file: int) -> None:
        self.socket, self._sending = socket.socket(fileno=file), threading.Lock()
        self._coming = self.socket.makefile("rb")

    def send(self, message: Any) -> None:
        """Send a list or an object; OSError, where nobody is there any more."""
        packed = pack_message(message)
        with self._sending:
            self.socket.sendall(packed)

    def receive(self) -> Any:
        """What was sent; EOFError or OSError, where nobody is there any more."""
        [size] = SIZE.unpack(self._bytes(SIZE.size))
        return from_json(self._bytes(size))

    def _bytes(self, count: int) -> bytes:
        found = self._coming.read(count)
        if len(found) < count:
            raise EOFError
        return found


class SendQueue:
    """Sends down a line and never waits: what is not taken at once is sent by a thread, in its order. Nothing else may send meanwhile."""

    def __init__(self, line: MessageSocket) -> None:
        self._socket, self._late = line.socket, SimpleQueue[bytes | None]()
        self._behind, self._sending = 0, threading.Lock()
        threading.Thread(target=self._send_late, name="textmill-orders", daemon=True).start()

    def put(self, message: Any) -> None:
        """Send a list or an object; where nobody is there any more, nothing happens: who receives finds that out."""
        packed = pack_message(message)
        with self._sending, suppress(OSError):
            if not self._behind:
                with suppress(BlockingIOError):
                    packed = packed[self._socket.send(packed, socket.MSG_DONTWAIT) :]
            if packed:
                self._behind += 1
                self._late.put(packed)

    def close(self) -> None:
        """Send nothing more."""
        self._late.put(None)

    def _send_late(self) -> None:
        with suppress(OSError):
            while (packed := self._late.get()) is not None:
                self._socket.sendall(packed)
                with self._sending:
                    self._behind -= 1


def pack_message(message: Any) -> bytes:
    """A list or an object as it travels."""
    text = to_json(message)
    return SIZE.pack(len(text)) + text


def tune_interpreter() -> None:
    """What both do before the first request: threads take short turns, and all that is there by now is not searched for garbage any more,
    which would hold up every text for a tenth of a second; nor is what comes later, but rarely: almost all of it goes by itself."""
    sys.setswitchinterval(TURN)
    gc.collect()
    gc.freeze()
    gc.set_threshold(RARELY)


def new_socket_pair() -> tuple[MessageSocket, socket.socket]:
    """Our end, and theirs as it is handed to a process."""
    ours, theirs = socket.socketpair()
    return MessageSocket(ours.detach()), theirs


def pack_request(request: Request) -> list[Any]:
    """A request as lists and numbers; of its settings those that were ever set."""
    sample = request.sample.model_dump(exclude_defaults=True)
    return [request.ids, sample, request.stop, request.stop_ids, request.bias, request.logprobs, request.echo]


def request_of(packed: list[Any]) -> Request:
    """The request again."""
    ids, sample, stop, stop_ids, bias, logprobs, echo = packed
    pairs = tuple((id_, value) for id_, value in bias)
    return Request(tuple(ids), SampleConfig.model_validate(sample), tuple(stop), tuple(stop_ids), pairs, logprobs, echo)


def replace_surrogates(text: str) -> str:
    """A text of whatever came in or went wrong, in characters that can be sent and written."""
    return text.encode("utf-8", "replace").decode()


def pack_chunk(number: int, part: TextChunk) -> list[Any]:
    """A part of a text, with the number of its request."""
    done = part.done
    end = None if done is None else [done.reason, done.tokens, replace_surrogates(done.message), done.prompt_logprobs]
    return [number, part.text, part.entries, end]


def unpack_chunk(packed: list[Any]) -> tuple[int, TextChunk]:
    """The part again."""
    number, text, entries, end = packed
    if end is None:
        return number, TextChunk(text, entries)
    reason, tokens, message, judged = end
    return number, TextChunk(text, entries, Done(reason, tokens, "", message, judged))
