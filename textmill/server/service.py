"""The service: a model with its limits and metrics, which every route uses."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from textmill.config import SampleConfig, ServeConfig
from textmill.generation.encoders.embedding_texts import TextEncoder
from textmill.generation.encoders.fill_texts import MaskedTexts
from textmill.generation.requests import EncoderRequest, Request
from textmill.generation.text_chunks import DeliverChunk
from textmill.server.metrics import Metrics
from textmill.server.token_text import TokenTexts
from textmill.server.wakeup import WakeupQueue
from textmill.tokens.vocabulary.tokenizer import TextTokenizer


class ServedModel(Protocol):
    """What the server needs: `model_process.ModelProcess`, or `text_chunks.ChunkDelivery` in this process."""

    vocab: int
    positions: int
    tokenizer: TextTokenizer

    def submit(
        self,
        request: Request | EncoderRequest,
        deliver: DeliverChunk,
        deadline: float | None = None,
        streamed: bool = False,
    ) -> int:
        """Queue a request; its text is delivered in one chunk, or in many if it is streamed."""
        ...

    def cancel(self, number: int) -> None:
        """End a request before the next step."""
        ...

    def stats(self) -> dict[str, int | float]:
        """Return the counts for /metrics."""
        ...

    def problem(self, max_step_seconds: float) -> str:
        """Describe what is wrong with the model; empty if nothing is."""
        ...

    def close(self, grace: float) -> None:
        """Accept no more; let running requests finish for `grace` seconds, then stop. A second call may shorten it."""
        ...


class Template(Protocol):
    """A chat template: turns a conversation into a prompt."""

    @property
    def jinja(self) -> str:
        """The template in Jinja, as transformers stores it."""
        ...

    def render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        """Return the conversation's token ids, with the start of the assistant's turn if requested."""
        ...


@dataclass
class Service:
    """One served model."""

    model: ServedModel
    config: ServeConfig
    sample: SampleConfig
    """Defaults for what a request leaves out."""
    name: str
    step: int = 0
    template: Template | None = None
    key: str | None = None
    generates: bool = True
    """Whether the model predicts the next token, so that it continues texts."""
    text_encoder: TextEncoder | None = None
    """How texts are encoded for embeddings, if the model has them."""
    masked_texts: MaskedTexts | None = None
    """How texts with masks are encoded, if the model predicts masked tokens."""
    stopping: bool = False
    metrics: Metrics = field(default_factory=Metrics)
    wakeups: WakeupQueue = field(default_factory=WakeupQueue)
    created: int = field(default_factory=lambda: int(time.time()))
    token_texts: TokenTexts = field(init=False)
    longest_text: float = field(init=False)
    """Upper bound of a prompt's characters: the longest token, as often as the context allows."""

    def __post_init__(self) -> None:
        self.token_texts = TokenTexts(self.model.tokenizer)
        inner = self.model.tokenizer.inner
        # With a normalizer there is no bound, because it may remove characters.
        longest = math.inf if inner.normalizer else max(map(len, inner.get_vocab()))
        self.longest_text = self.longest_prompt * longest

    @property
    def longest_prompt(self) -> int:
        """Tokens that a prompt may have: at most one less than the context."""
        return min(self.config.max_prompt or self.model.positions, self.model.positions - 1)

    def model_info(self) -> dict[str, Any]:
        """Return the model's entry in /v1/models."""
        sample = self.sample.model_dump(exclude={"prompt", "prompts_file", "count", "seed", "slide_context"})
        # The API keeps the fields' old names.
        sample |= {"prompts": self.sample.prompts_file, "slide": self.sample.slide_context}
        limits = {
            "max_tokens": self.config.max_tokens,
            "n": self.config.max_choices,
            "prompt": self.longest_prompt,
            "inputs": self.config.max_inputs,
        }
        encoder = self.text_encoder
        embedding = None if encoder is None else {"dimensions": encoder.dimension, "tokens": encoder.longest}
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "textmill",
            "max_model_len": self.model.positions,
            "step": self.step,
            "vocab": self.model.vocab,
            "chat": self.template is not None,
            "sample": sample,
            "limits": limits,
            "generate": self.generates,
            "mask": None if self.masked_texts is None else self.masked_texts.mask,
            "embedding": embedding,
        }

    def problem(self) -> str:
        """Describe what is wrong with the model; empty if nothing is."""
        return self.model.problem(self.config.step_timeout)

    def retry_after(self) -> int:
        """Estimate the seconds until a refused client should try again, from the queue and recent request times."""
        stats = self.model.stats()
        rounds = (stats["waiting"] + stats["active"]) / max(stats["slots"], 1)
        return max(1, min(60, math.ceil(rounds * self.metrics.mean_seconds())))
