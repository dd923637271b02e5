"""What is asked of a generator and what it answers, piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from textmill.config import SampleConfig

Reason = Literal["stop", "length", "cancelled", "timeout", "error"]
Top = tuple[tuple[int, float], ...]
"""The likeliest tokens and their log-probabilities, the likeliest first."""


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


@dataclass(frozen=True)
class Token:
    """One new token; log-probabilities are the model's own, before any rule of sampling."""

    id: int
    text: str
    """The text that this token settled; often none."""
    logprob: float | None = None
    top: Top = ()


@dataclass(frozen=True)
class Done:
    """The end of a request; nothing comes after it."""

    reason: Reason
    tokens: int
    """New tokens; one that ended the text is not counted."""
    text: str
    """What was held back until now."""
    message: str = ""
    """What went wrong, when something did."""
    prompt_logprobs: tuple[tuple[float | None, Top], ...] = ()
    """One for each token of the prompt, when asked; nothing stands before the first."""
