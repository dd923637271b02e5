"""Collects the tokens of a text into chunks: one chunk at the end, or one every 20 ms if the text is streamed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from textmill.generation.requests import Done, Request, Token, TopTokens
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

CHUNK_SECONDS = 0.02
"""Time between two chunks of a streamed text: continuous for a reader, and few messages even at 100,000 tokens/s."""

TokenLogprob = tuple[int, float | None, TopTokens]
"""A token's id, its log-probability, and the most likely tokens at its position."""


@dataclass(frozen=True)
class TextChunk:
    """The new text of one request since its previous chunk."""

    text: str
    logprobs: Sequence[TokenLogprob] = ()
    """Its tokens, if the request has `logprobs`."""
    done: Done | None = None
    """Set in the last chunk. `Done.text` is already part of `text`."""


DeliverChunk = Callable[[TextChunk], None]


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


class TokenDelivery(Protocol):
    """Accepts requests and delivers their texts token by token, as `generation.scheduler.Scheduler` does."""

    vocab: int
    positions: int
    tokenizer: TextTokenizer

    def submit(
        self, request: Request, deliver: Callable[[Token | Done], None], deadline: float | None = None
    ) -> int: ...
    def cancel(self, number: int) -> None: ...
    def stats(self) -> dict[str, int | float]: ...
    def problem(self, max_step_seconds: float) -> str: ...
    def close(self, grace: float) -> None: ...


class ChunkDelivery:
    """Accepts requests and delivers their texts in chunks, which it collects from the tokens of `inner`."""

    def __init__(self, inner: TokenDelivery) -> None:
        self.inner = inner
        self.vocab = inner.vocab
        self.positions = inner.positions
        self.tokenizer = inner.tokenizer
        self.cancel = inner.cancel
        self.stats = inner.stats
        self.problem = inner.problem
        self.close = inner.close

    def submit(
        self, request: Request, deliver: DeliverChunk, deadline: float | None = None, streamed: bool = False
    ) -> int:
        """Queue a request and return its number. A text has one chunk, or many if it is streamed."""
        return self.inner.submit(request, ChunkCollector(deliver, bool(request.logprobs), streamed), deadline)
