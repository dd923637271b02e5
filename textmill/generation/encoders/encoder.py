"""Answers embedding and fill requests: one thread runs the model for the texts of many requests at a time."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.generation.encoders.embedder_torch import Embedder
from textmill.generation.encoders.filler_torch import Filler
from textmill.generation.model_thread import Job, ModelThread
from textmill.generation.requests import Done, EmbedRequest, EncoderRequest, FillRequest, FinishReason, Token
from textmill.generation.text_chunks import ChunkCollector, DeliverChunk
from textmill.generation.turns import Turns

STEP_TOKENS = {"cpu": 512, "cuda": 1 << 15}
"""Tokens of all requests that are computed in one step. Texts that are generated wait for it, and cancelled requests
end after it."""


class EncoderThread(ModelThread[EncoderRequest]):
    """Runs up to `slots` requests at a time and queues `queue` more; texts of different requests share a step.

    Every accepted request gets exactly one chunk with Done. Its text is the result: JSON for masks, and for embeddings
    float32 numbers in base64. `after_step` is called in the encoder's thread after the results of each step.
    """

    def __init__(
        self,
        embedder: Embedder,
        filler: Filler | None,
        *,
        slots: int,
        queue: int,
        turns: Turns | None = None,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.tokenizer, self.positions = embedder.texts.tokenizer, int(embedder.net.shape.positions)
        self.vocab = self.tokenizer.vocab
        self.can_fill = filler is not None
        work = Encoding(embedder, filler)
        super().__init__("textmill-encoder", work, slots=slots, queue=queue, after_step=after_step, turns=turns)

    def submit(
        self, request: EncoderRequest, deliver: DeliverChunk, deadline: float | None = None, streamed: bool = False
    ) -> int:
        """Queue a request and return its number; raises QueueFull, or TextmillError if it cannot be done.

        `streamed` has no effect: there is only one chunk.
        """
        if isinstance(request, FillRequest) and not self.can_fill:
            raise TextmillError("the model has no head for masked tokens, so it cannot fill them in")
        return self._enqueue(request, ChunkCollector(deliver, with_logprobs=False, streamed=False), deadline)


@dataclass(eq=False)
class Embedding:
    """A request for embeddings, and those found so far."""

    request: EmbedRequest
    vectors: NDArray[np.float32]
    left: list[int]
    """Which texts are not computed yet, the next one last; long texts come first."""
    tokens: int = 0
    """Tokens of the computed texts."""

    def count_tokens(self, text: int) -> int:
        """Return the length of a text."""
        return len(self.request.ids[text])

    def result(self) -> str:
        """Return all embeddings: float32 numbers in base64."""
        return base64.b64encode(self.vectors.astype("<f4", copy=False).tobytes()).decode()


@dataclass(eq=False)
class Filling:
    """A request to fill masks, and the texts filled so far."""

    request: FillRequest
    filler: Filler
    left: list[int]
    """Which texts are not computed yet, the next one last; in the order of the request."""
    tokens: int = 0
    """Tokens of the computed texts."""
    filled: list[dict[str, Any]] = field(default_factory=list)

    def count_tokens(self, text: int) -> int:
        """Return the length of a text, special tokens included."""
        return len(self.filler.texts.encode(self.request.prompts[text]))

    def fill(self, texts: list[int]) -> None:
        """Fill these texts."""
        prompts = [self.request.prompts[text] for text in texts]
        self.filled += [asdict(one) for one in self.filler.fill(prompts, self.request.choices)]

    def result(self) -> str:
        """Return all filled texts as JSON."""
        return json.dumps(self.filled, ensure_ascii=False)


class Encoding:
    """The encoder's work: in a step every request has an equal share of the tokens, so small requests end early.

    With STEP_TOKENS of 512 and two requests, the one with 40 texts of 512 tokens computes one text a step; the other,
    with 20 texts of 10 tokens, is complete after the first step.
    """

    def __init__(self, embedder: Embedder, filler: Filler | None) -> None:
        self.embedder = embedder
        self.filler = filler
        self._step_tokens = STEP_TOKENS.get(embedder.net.head.device.type, STEP_TOKENS["cpu"])
        self._active: dict[int, Embedding | Filling] = {}

    def count_joining(self, waiting: Sequence[Job[EncoderRequest]], active: int, now: float) -> int:
        """All join at once: a new request delays the others by no more than a step."""
        return len(waiting)

    def add(self, number: int, item: EncoderRequest) -> None:
        """Let a request join at the next step."""
        if isinstance(item, EmbedRequest):
            vectors = np.zeros((len(item.ids), self.embedder.texts.dimension), np.float32)
            shortest_first = sorted(range(len(item.ids)), key=lambda text: len(item.ids[text]))
            self._active[number] = Embedding(item, vectors, shortest_first)
        else:
            assert self.filler is not None
            self._active[number] = Filling(item, self.filler, list(reversed(range(len(item.prompts)))))

    def step(self) -> list[tuple[int, Token | Done]]:
        """Compute some texts of each request; return the ends of the requests that are complete."""
        share = max(1, self._step_tokens // len(self._active))
        to_embed: list[tuple[Embedding, int]] = []
        for one in self._active.values():
            texts = _take(one, share)
            if isinstance(one, Embedding):
                to_embed += [(one, text) for text in texts]
            else:
                one.fill(texts)
        self._embed(to_embed)
        complete = {number: one for number, one in self._active.items() if not one.left}
        for number in complete:
            del self._active[number]
        return [(number, Done("stop", one.tokens, one.result())) for number, one in complete.items()]

    def _embed(self, texts: list[tuple[Embedding, int]]) -> None:
        """Compute texts of several requests together."""
        ids = [np.array(one.request.ids[text]) for one, text in texts]
        for (one, text), vector in zip(texts, self.embedder.embed_ids(ids), strict=True):
            one.vectors[text] = vector

    def drop(self, number: int, reason: FinishReason) -> Done | None:
        """Forget a request that ends early: it has no result."""
        self._active.pop(number, None)
        return None

    def fail(self, message: str) -> dict[int, Done]:
        """Forget all requests."""
        self._active.clear()
        return {}


def _take(one: Embedding | Filling, tokens: int) -> list[int]:
    """Take the next texts of a request with about this many tokens, at least one text."""
    taken: list[int] = []
    while one.left and tokens > 0:
        text = one.left.pop()
        length = one.count_tokens(text)
        taken.append(text)
        tokens -= length
        one.tokens += length
    return taken
