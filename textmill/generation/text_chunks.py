"""Texts told in parts: what has come of one goes out together, when it is over or, where it is streamed, now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from textmill.generation.requests import Done, Request, Token, TopTokens
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

OFTEN = 0.02
"""Seconds between two parts of a text that is streamed: faster than eyes, and a model makes a hundred thousand tokens in a second."""

Entry = tuple[int, float | None, TopTokens]
"""A token's id, its log-probability, and the likeliest tokens in its place."""


@dataclass(frozen=True)
class TextChunk:
    """What has come of a text since its last part."""

    text: str
    entries: Sequence[Entry] = ()
    """Its tokens, where log-probabilities were asked."""
    done: Done | None = None
    """The end, whose own text is in `text` already."""


Deliver = Callable[[TextChunk], None]


class ChunkCollector:
    """Takes what becomes of one text, token by token, and hands it on in parts."""

    def __init__(self, deliver: Deliver, judged: bool, streamed: bool) -> None:
        self._deliver, self._judged, self._streamed = deliver, judged, streamed
        self._texts: list[str] = []
        self._entries: list[Entry] = []
        self._turn = -1

    def __call__(self, event: Token | Done) -> None:
        """Take one token, or the end."""
        if event.text:
            self._texts.append(event.text)
        if isinstance(event, Done):
            self._hand_on(event)
            return
        if self._judged:
            self._entries.append((event.id, event.logprob, event.top))
        # All texts have their turn at the same moments, so that their parts can travel together.
        if self._streamed and (self._texts or self._entries) and (turn := int(time.monotonic() / OFTEN)) != self._turn:
            self._turn = turn
            self._hand_on(None)

    def _hand_on(self, done: Done | None) -> None:
        texts, self._texts = self._texts, []
        entries, self._entries = self._entries, []
        self._deliver(TextChunk("".join(texts), entries, done))


class TokenScheduler(Protocol):
    """What gives a text token by token, as `generation.scheduler.Scheduler` does."""

    vocab: int
    positions: int
    tokenizer: TextTokenizer

    def submit(
        self, request: Request, deliver: Callable[[Token | Done], None], deadline: float | None = None
    ) -> int: ...
    def cancel(self, number: int) -> None: ...
    def stats(self) -> dict[str, int | float]: ...
    def problem(self, patience: float) -> str: ...
    def close(self, grace: float) -> None: ...


class ChunkingScheduler:
    """A scheduler whose texts come in parts."""

    def __init__(self, inner: TokenScheduler) -> None:
        self.inner, self.vocab, self.positions, self.tokenizer = inner, inner.vocab, inner.positions, inner.tokenizer
        self.cancel, self.stats, self.problem, self.close = inner.cancel, inner.stats, inner.problem, inner.close

    def submit(self, request: Request, deliver: Deliver, deadline: float | None = None, streamed: bool = False) -> int:
        """Queue a request; its number. `deliver` is called for each part, the last of which has the end; one not streamed has one part."""
        return self.inner.submit(request, ChunkCollector(deliver, bool(request.logprobs), streamed), deadline)
