"""What is asked of a generator and what it answers, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from textmill.config import SampleConfig
from textmill.errors import TextmillError

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
TopTokens = tuple[tuple[int, float], ...]
"""The likeliest tokens and their log-probabilities, the likeliest first."""


class QueueFull(Exception):
    """The queue is full; come back later."""


@dataclass(frozen=True)
class Request:
    """A text to continue, and how."""

    ids: tuple[int, ...]
    """The prompt, at least one token."""
    sample: SampleConfig
    stop: tuple[str, ...] = ()
    """The text ends before the first of these."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the text, besides the end-of-text token."""
    bias: tuple[tuple[int, float], ...] = ()
    """What is added to the scores of tokens."""
    logprobs: int = 0
    """0: none; k: log-probabilities of each new token and of the k likeliest in its place."""
    echo: bool = False
    """Also log-probabilities of the prompt's own tokens."""


class Token(NamedTuple):
    """One new token; log-probabilities are the model's own, before any rule of sampling."""

    id: int
    text: str
    """The text that this token settled; often none."""
    logprob: float | None = None
    top: TopTokens = ()


@dataclass(frozen=True)
class Done:
    """The end of a request; nothing comes after it."""

    reason: FinishReason
    tokens: int
    """New tokens; one that ended the text is not counted."""
    text: str
    """What was held back until now."""
    message: str = ""
    """What went wrong, when something did."""
    prompt_logprobs: tuple[tuple[float | None, TopTokens], ...] = ()
    """One for each token of the prompt, when asked; nothing stands before the first."""


def max_new_tokens(request: Request, positions: int, vocab: int) -> int:
    """New tokens that are asked and fit after the prompt; what cannot be done is refused."""
    length, asked = len(request.ids), request.sample.max_tokens
    strange = [id_ for id_ in (*request.ids, *request.stop_ids, *dict(request.bias)) if not 0 <= id_ < vocab]
    if not request.ids or strange:
        found = f"{strange[0]} is no token" if strange else "no tokens"
        raise TextmillError(f"sample.prompt: {found}; give ids from 0 to {vocab - 1:,}, one at least")
    if length > positions - min(asked, 1):
        raise TextmillError(
            f"sample.prompt: {length:,} tokens; the model sees {positions:,} at a time, one of them new; give {positions - 1:,} at most"
        )
    slides = request.sample.slide and request.sample.beams == 1
    return asked if slides else min(asked, positions - length)


def max_new_tokens_served(request: Request, positions: int, vocab: int) -> int:
    """The same for a request among others, where nothing is searched."""
    if request.sample.beams > 1:
        raise TextmillError("sample.beams: beam search is not served; set it to 1, or use textmill generate")
    return max_new_tokens(request, positions, vocab)


def describe_hang(seconds: float) -> str:
    """What is said of a step that does not end."""
    return f"the model has not ended a step for {seconds:.0f} s; restart the server if it does not come back"
