"""Messages between the HTTP process and the model process: JSON over a socket, each preceded by its length in bytes.

The HTTP process sends the settings of the model, and receives {"ready": true}, or {"refused": "why", "memory": false},
where memory says that there is too little of it. After that, for a request with number 7 and 29.5 seconds of time,
whose text is streamed:

    to the model process        ["submit", 7, [[464, 4475], {"temperature": 0}, [], [], [], 0, false, ""], 29.5, true]
                                ["cancel", 7]
                                ["close", 30]                           with the grace in seconds
    from the model process      [512, 3, 0.0, "", [[7, " by the", [], null], [7, " river", [], ["stop", 3, "", []]]]]

The last is the state of the model (tokens and cancelled requests so far, seconds of the current step, its problem) and
new chunks; without chunks it is a heartbeat. `pack_request` and `pack_chunk` write the inner lists.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

from pydantic_core import from_json, to_json

from textmill.config import SampleConfig
from textmill.generation.requests import Done, EmbedRequest, EncoderRequest, FillRequest, Request, TextChunk

HEARTBEAT_SECONDS = 0.5
"""Longest time between two messages of a healthy model process."""

LENGTH_PREFIX = struct.Struct("!Q")
"""The length in bytes that precedes each message."""


class MessageSocket:
    """One end of the socket. Many threads may send; one thread receives."""

    def __init__(self, file_descriptor: int) -> None:
        self.socket = socket.socket(fileno=file_descriptor)
        self._send_lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a JSON value; raise OSError if the other end is gone."""
        packed = pack_message(message)
        with self._send_lock:
            self.socket.sendall(packed)

    def receive(self) -> Any:
        """Return the next message; raise EOFError or OSError if the other end is gone."""
        [size] = LENGTH_PREFIX.unpack(self._read(LENGTH_PREFIX.size))
        return from_json(self._read(size))

    def _read(self, count: int) -> bytes:
        data = self.socket.recv(count, socket.MSG_WAITALL)  # no more than that: asyncio reads on in the HTTP process
        if len(data) < count:
            raise EOFError
        return data


def pack_message(message: Any) -> bytes:
    """Return a JSON value as bytes: its length, then its text."""
    encoded = to_json(message)
    return LENGTH_PREFIX.pack(len(encoded)) + encoded


def new_socket_pair() -> tuple[MessageSocket, socket.socket]:
    """Return this process's end, and the end to pass to a child process."""
    ours, theirs = socket.socketpair()
    return MessageSocket(ours.detach()), theirs


def pack_request(request: Request | EncoderRequest) -> list[Any]:
    """Return a request as a JSON value, without the sampling settings that have their default."""
    if isinstance(request, EmbedRequest):
        return ["embed", request.ids]
    if isinstance(request, FillRequest):
        return ["fill", request.prompts, request.choices]
    sample = request.sample.model_dump(exclude_defaults=True)
    return [
        request.ids,
        sample,
        request.stop,
        request.stop_ids,
        request.bias,
        request.logprobs,
        request.echo,
        request.grammar,
    ]


def unpack_request(packed: list[Any]) -> Request | EncoderRequest:
    """Undo `pack_request`."""
    if packed[0] == "embed":
        return EmbedRequest(tuple(map(tuple, packed[1])))
    if packed[0] == "fill":
        return FillRequest(tuple(packed[1]), packed[2])
    ids, sample, stop, stop_ids, bias, logprobs, echo, grammar = packed
    pairs = tuple((id_, value) for id_, value in bias)
    settings = SampleConfig.model_validate(sample)
    return Request(tuple(ids), settings, tuple(stop), tuple(stop_ids), pairs, logprobs, echo, grammar)


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded as UTF-8."""
    return text.encode("utf-8", "replace").decode()


def pack_chunk(number: int, chunk: TextChunk) -> list[Any]:
    """Return a chunk as a JSON value; `number` identifies its request."""
    done = chunk.done
    if done is None:
        return [number, chunk.text, chunk.logprobs, None]
    done_fields = [done.reason, done.tokens, replace_surrogates(done.message), done.prompt_logprobs, done.reused]
    return [number, chunk.text, chunk.logprobs, done_fields]


def unpack_chunk(packed: list[Any]) -> tuple[int, TextChunk]:
    """Undo `pack_chunk`."""
    number, text, logprobs, done_fields = packed
    if done_fields is None:
        return number, TextChunk(text, logprobs)
    reason, tokens, message, prompt_logprobs, reused = done_fields
    return number, TextChunk(text, logprobs, Done(reason, tokens, "", message, prompt_logprobs, reused))
