"""Requests to a model, and what answers them: one Token per new token, then one Done; or both joined to chunks.

Messages between both processes are JSON over a socket, each preceded by its length in bytes. The HTTP process sends the
settings of the model, and receives {"ready": true}, or {"refused": "why", "memory": false}, where memory says that
there is too little of it. After that, for a request with number 7 and 29.5 seconds of time, whose text is streamed:

    to the model process        ["submit", 7, {"ids": [464, 4475], "sample": {...}, "stop": [], ...}, 29.5, true]
                                ["cancel", 7]
                                ["close", 30]                           with the grace in seconds
    from the model process      [512, 3, 0.0, "", [[7, " by the", [], null], [7, " river", [], ["stop", 3, "", [], 0]]]]

The last is the state of the model (tokens and cancelled requests so far, seconds of the current step, its problem) and
new chunks, written by `pack_chunk`; without chunks it is a heartbeat.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from textmill.config import SampleConfig
from textmill.errors import TextmillError

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
TopTokens = tuple[tuple[int, float], ...]
"""The most likely tokens and their log-probabilities, the most likely first."""
TokenLogprob = tuple[int, float | None, TopTokens]
"""A token's id, its log-probability, and the most likely tokens at its position."""


class QueueFull(Exception):
    """The queue is full; try again later."""


class MemoryShort(TextmillError):
    """The model does not fit into the memory that is free."""


@dataclass(frozen=True)
class Request:
    """A prompt to continue, and the sampling settings."""

    ids: tuple[int, ...]
    """The prompt's token ids, at least one."""
    sample: SampleConfig
    stop: tuple[str, ...] = ()
    """Stop strings: the text ends before the first of them."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the text, in addition to the end-of-text token."""
    bias: tuple[tuple[int, float], ...] = ()
    """Logit bias: token ids and the numbers added to their logits."""
    logprobs: int = 0
    """0: no log-probabilities; k: those of each new token and of the k most likely tokens at its position."""
    echo: bool = False
    """Also compute log-probabilities of the prompt's own tokens."""
    grammar: str = ""
    """What the text must follow, made by a function of constraints.py; empty: anything."""
    beam_rank: int = 0
    """Which of the texts that beam search finds; 0 is the best."""


@dataclass(frozen=True)
class EmbedRequest:
    """Texts whose embeddings are wanted."""

    ids: tuple[tuple[int, ...], ...]
    """The token ids of each text, special tokens included."""


@dataclass(frozen=True)
class FillRequest:
    """Texts whose masks are to be filled in."""

    prompts: tuple[str, ...]
    choices: int
    """How many tokens to return for each mask."""


EncoderRequest = EmbedRequest | FillRequest
"""A request that is answered at once, without new tokens."""


def repeat_request(request: Request, count: int, first_seed: int) -> list[Request]:
    """Return a request `count` times: the seeds count up from `first_seed`; beam search gives its best texts."""
    return [
        replace(request, sample=request.sample.model_copy(update={"seed": first_seed + number}), beam_rank=number)
        for number in range(count)
    ]


class Token(NamedTuple):
    """One new token. Its log-probabilities are the model's own, before any sampling rule."""

    id: int
    text: str
    """The text that this token completed; often empty."""
    logprob: float | None = None
    top: TopTokens = ()


@dataclass(frozen=True)
class Done:
    """The last event of a request."""

    reason: FinishReason
    tokens: int
    """Number of new tokens, without the one that ended the text."""
    text: str
    """Text that was held back until now."""
    message: str = ""
    """The error message, if there was an error."""
    prompt_logprobs: tuple[tuple[float | None, TopTokens], ...] = ()
    """With `echo`: one entry per prompt token. The first has no log-probability."""
    reused: int = 0
    """Prompt tokens that were not computed, because an earlier text begins with them."""


@dataclass(frozen=True)
class TextChunk:
    """The new text of one request since its previous chunk."""

    text: str
    logprobs: Sequence[TokenLogprob] = ()
    """Its tokens, if the request has `logprobs`."""
    done: Done | None = None
    """Set in the last chunk. `Done.text` is already part of `text`."""


@dataclass
class ModelStats:
    """The texts of a model: those active and waiting now, the most of each, and counts since its start."""

    active: int
    waiting: int
    slots: int
    queue: int
    tokens: int = 0
    requests: int = 0
    cancelled: int = 0


DeliverChunk = Callable[[TextChunk], None]


def max_new_tokens(request: Request, positions: int, vocab: int, place: str = "sample.prompt") -> int:
    """Return how many new tokens the request allows and the context has space for; raise if it cannot be done.

    `place` names the prompt in the error.
    """
    length = len(request.ids)
    requested = request.sample.max_tokens
    unknown = [id_ for id_ in (*request.ids, *request.stop_ids, *dict(request.bias)) if not 0 <= id_ < vocab]
    if not request.ids or unknown:
        found = f"{unknown[0]} is not a token id" if unknown else "it has no tokens"
        raise TextmillError(f"{place}: {found}; give at least one id, from 0 to {vocab - 1:,}")
    if length > positions - min(requested, 1):
        raise TextmillError(
            f"{place}: {length:,} tokens; the model's context is {positions:,} tokens, at least one of them new; "
            f"shorten the prompt to {positions - 1:,} tokens"
        )
    slides = request.sample.slide_context and request.sample.beams == 1
    return requested if slides else min(requested, positions - length)


def max_new_tokens_served(request: Request, positions: int, vocab: int) -> int:
    """`max_new_tokens` for the scheduler, which does not do beam search."""
    check_served_settings(request.sample)
    return max_new_tokens(request, positions, vocab)


def check_served_settings(sample: SampleConfig) -> None:
    """Raise if the scheduler cannot sample with these settings."""
    if sample.beams > 1:
        raise TextmillError(
            f"sample.beams: {sample.beams}, but the server has no beam search; set sample.beams=1, or use textmill "
            "generate"
        )


def describe_hang(seconds: float) -> str:
    """Return the message for a step that does not end."""
    return f"the model has been in one step for {seconds:.0f} s; restart the server if it does not recover"


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


REQUEST = TypeAdapter(Request)
ENCODER_REQUEST = TypeAdapter[EncoderRequest](EncoderRequest)


def unpack_request(packed: dict[str, Any]) -> Request | EncoderRequest:
    """Return a request from its JSON value."""
    return REQUEST.validate_python(packed) if "sample" in packed else ENCODER_REQUEST.validate_python(packed)


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
