"""Service: the model behind the server, its limits and what was counted; what every route works with."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from textmill.config import SampleConfig, ServeConfig
from textmill.generation.requests import Request
from textmill.generation.text_chunks import DeliverChunk
from textmill.server.metrics import Metrics
from textmill.server.token_text import TokenTexts
from textmill.server.wakeup import WakeupQueue
from textmill.tokens.vocabulary.tokenizer import TextTokenizer


class Scheduler(Protocol):
    """What the server asks of the model's side: `server.remote.RemoteScheduler`, or `generation.parts.ChunkingScheduler` in the same process."""

    vocab: int
    positions: int
    tokenizer: TextTokenizer

    def submit(
        self, request: Request, deliver: DeliverChunk, deadline: float | None = None, streamed: bool = False
    ) -> int:
        """Queue a request; its text comes in one part, or in many if it is streamed."""
        ...

    def cancel(self, number: int) -> None:
        """End a request at the next step."""
        ...

    def stats(self) -> dict[str, int | float]:
        """What runs, waits and was done."""
        ...

    def problem(self, patience: float) -> str:
        """What is wrong with the model; empty: nothing."""
        ...

    def close(self, grace: float) -> None:
        """Finish what runs, then end."""
        ...


class Template(Protocol):
    """How a conversation becomes the prompt of a model that was trained on such."""

    @property
    def jinja(self) -> str:
        """The same as transformers writes it."""
        ...

    def render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        """The conversation as token ids, ready for the assistant's turn where that is asked."""
        ...


@dataclass
class Service:
    """One served model."""

    scheduler: Scheduler
    config: ServeConfig
    sample: SampleConfig
    """What a request leaves unsaid."""
    name: str
    step: int = 0
    template: Template | None = None
    key: str | None = None
    stopping: bool = False
    metrics: Metrics = field(default_factory=Metrics)
    mail: WakeupQueue = field(default_factory=WakeupQueue)
    created: int = field(default_factory=lambda: int(time.time()))
    pieces: TokenTexts = field(init=False)
    longest_text: float = field(init=False)
    """Characters that a prompt can have at all: the longest token, as often as there is room."""

    def __post_init__(self) -> None:
        self.pieces, inner = TokenTexts(self.scheduler.tokenizer), self.scheduler.tokenizer.inner
        # A normalizer may take characters away before they become tokens.
        longest = math.inf if inner.normalizer else max(map(len, inner.get_vocab()))
        self.longest_text = self.longest_prompt * longest

    @property
    def longest_prompt(self) -> int:
        """Tokens that a prompt may have: one less than the model sees."""
        return min(self.config.max_prompt or self.scheduler.positions, self.scheduler.positions - 1)

    def facts(self) -> dict[str, Any]:
        """The model as /v1/models tells it."""
        told = self.sample.model_dump(exclude={"prompt", "prompts_file", "count", "seed", "slide_context"})
        told |= {"prompts": self.sample.prompts_file, "slide": self.sample.slide_context}  # the API keeps its names
        return {
            "id": self.name, "object": "model", "created": self.created, "owned_by": "textmill", "max_model_len": self.scheduler.positions,
            "step": self.step, "vocab": self.scheduler.vocab, "chat": self.template is not None, "sample": told,
            "limits": {"max_tokens": self.config.max_tokens, "n": self.config.max_choices, "prompt": self.longest_prompt},
        }  # fmt: skip

    def problem(self) -> str:
        """What is wrong with the model, in words; empty: nothing."""
        return self.scheduler.problem(self.config.step_timeout)

    def wait_of(self) -> int:
        """Seconds after which a refused client may try again: what waits, at the rate of the last requests."""
        stats = self.scheduler.stats()
        turns = (stats["waiting"] + stats["active"]) / max(stats["slots"], 1)
        return max(1, min(60, math.ceil(turns * self.metrics.mean_seconds())))
