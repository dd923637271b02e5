"""Embeddings and filled masks: the nets that compute them, and the requests of a server for them.

Shapes in names: N rows, T tokens of a row, U texts, M tokens of all texts, E width.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EmbedConfig, EngineConfig
from textmill.devices import open_device, torch_dtype
from textmill.errors import TextmillError
from textmill.generation.embed import Ids, TextEncoder, new_text_encoder
from textmill.generation.fill import MaskedTexts, new_masked_texts
from textmill.generation.requests import Done, EmbedRequest, EncoderRequest, FillRequest, FinishReason, Token
from textmill.models import check_masked_head
from textmill.models.base_torch import BaseNet
from textmill.models.nets_torch import open_net
from textmill.models.packed_texts import PackedTexts, pack_texts
from textmill.models.pooling import Pooling
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

GPU_ROW_TOKENS = 512
CPU_ROW_TOKENS = 64
"""Short texts share rows of this many tokens: few rows are fast on a GPU, short rows cost less attention."""
GPU_BATCH_TOKENS = 1 << 16
CPU_BATCH_TOKENS = 2048
"""Tokens in one forward pass; more do not fit into a CPU's caches."""
FILL_BATCH_TOKENS = 8192
"""The same for masks, whose logits need memory too."""
STEP_TOKENS = {"cpu": 512, "cuda": 1 << 15}
"""Tokens of all requests that are computed in one step. Texts that are generated wait for it, and cancelled requests
end after it."""

Vectors = NDArray[np.float32]


class Embedder:
    """A net, and how a vector is made of its hidden states. Texts do not affect each other."""

    def __init__(self, net: BaseNet, texts: TextEncoder, pooling: Pooling, where: str) -> None:
        self.net = net
        self.texts = texts
        self.pooling = pooling
        self.where = where

    def embed(self, texts: list[str]) -> Vectors:
        """The embeddings [U, E] of texts."""
        return self.embed_ids([one.ids for one in self.texts.encode(texts)])

    def embed_ids(self, ids: Sequence[Ids]) -> Vectors:
        """The embeddings of encoded texts, special tokens included, in the order given."""
        vectors: Vectors = np.zeros((len(ids), self.texts.dimension), np.float32)
        for numbers, found in self.batches(ids):
            vectors[numbers] = found
        return vectors

    def batches(self, ids: Sequence[Ids]) -> Iterator[tuple[Ids, Vectors]]:
        """The same batch by batch, longest texts first: which texts, and their embeddings."""
        on_cpu = self.net.head.device.type == "cpu"
        packed = pack_texts(
            ids,
            row_tokens=CPU_ROW_TOKENS if on_cpu else GPU_ROW_TOKENS,
            batch_tokens=CPU_BATCH_TOKENS if on_cpu else GPU_BATCH_TOKENS,
        )
        for one in packed:
            vectors = self._embed(one)
            if not np.isfinite(vectors).all():
                raise TextmillError(
                    f"{self.where}: an embedding is not finite; the weights are damaged or training diverged"
                )
            yield one.numbers_U, vectors

    @torch.inference_mode()
    def _embed(self, packed: PackedTexts) -> Vectors:
        device = self.net.head.device
        documents = None if packed.documents_NT is None else torch.from_numpy(packed.documents_NT).to(device)
        states_NTE = self.net(torch.from_numpy(packed.ids_NT).to(device), documents_NT=documents)
        pooled_UE = self._pool(states_NTE.flatten(0, 1), packed)
        vectors: Vectors = (F.normalize(pooled_UE) if self.pooling.normalize else pooled_UE).cpu().numpy()
        return vectors

    def _pool(self, flat: Tensor, packed: PackedTexts) -> Tensor:
        def on_device(array: Ids) -> Tensor:
            return torch.from_numpy(array).to(flat.device)

        if self.pooling.kind == "cls":
            return flat[on_device(packed.starts_U)].float()
        sums_UE = torch.zeros(len(packed.lengths_U), flat.shape[1], device=flat.device)
        sums_UE.index_add_(0, on_device(packed.texts_M), flat[on_device(packed.places_M)].float())
        return sums_UE / on_device(packed.lengths_U)[:, None]


def open_embedder(checkpoint: Checkpoint, engine: EngineConfig, config: EmbedConfig) -> Embedder:
    """Load a checkpoint's net and tokenizer; an adapter is merged into its base."""
    tokenizer = open_tokenizer(checkpoint.tokenizer)
    device = open_device(engine.device)
    net = open_net(checkpoint.folder, device)
    texts, pooling = new_text_encoder(net.shape, tokenizer, config, checkpoint.folder)
    return Embedder(net.to(torch_dtype(engine.precision, device)), texts, pooling, str(checkpoint.folder))


@dataclass(frozen=True)
class Choice:
    """A token for a mask."""

    token: str
    id: int
    probability: float


@dataclass(frozen=True)
class Filled:
    """A text with its most likely tokens, and all choices for each of its masks."""

    prompt: str
    text: str
    masks: list[list[Choice]]


class Filler:
    """Fills masks."""

    def __init__(self, net: BaseNet, texts: MaskedTexts) -> None:
        self.net = net
        self.texts = texts

    def fill(self, prompts: Sequence[str], choices: int) -> Iterator[Filled]:
        """Each text in order with this many choices; texts are computed in batches and do not affect each other."""
        encoded = [self.texts.encode(prompt) for prompt in prompts]
        start = 0
        while start < len(encoded):
            stop = start + 1
            longest = len(encoded[start])
            while stop < len(encoded) and (stop + 1 - start) * max(longest, len(encoded[stop])) <= FILL_BATCH_TOKENS:
                longest = max(longest, len(encoded[stop]))
                stop += 1
            yield from self._fill(prompts[start:stop], encoded[start:stop], longest, choices)
            start = stop

    @torch.inference_mode()
    def _fill(self, prompts: Sequence[str], encoded: Sequence[list[int]], longest: int, count: int) -> Iterator[Filled]:
        device = self.net.head.device
        ids = torch.tensor([one + [self.texts.mask_id] * (longest - len(one)) for one in encoded], device=device)
        documents = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in encoded], device=device)
        states = self.net(ids, documents_NT=documents)
        for row, (prompt, one) in enumerate(zip(prompts, encoded, strict=True)):
            places = [place for place, id_ in enumerate(one) if id_ == self.texts.mask_id]
            chances = self.net.logits(states[row, places]).float().softmax(-1)[:, : self.texts.tokenizer.vocab]
            if not chances.isfinite().all():
                raise TextmillError("a probability is not finite; the weights are damaged or training diverged")
            values, tokens = chances.topk(min(count, chances.shape[1]))
            masks = [
                [Choice(self._text(id_), id_, chance) for id_, chance in zip(*pair, strict=True)]
                for pair in zip(tokens.tolist(), values.tolist(), strict=True)
            ]
            text, *rest = prompt.split(self.texts.mask)
            for choices, after in zip(masks, rest, strict=True):
                text += choices[0].token.removeprefix("##") + after
            yield Filled(prompt, text, masks)

    def _text(self, id_: int) -> str:
        tokenizer = self.texts.tokenizer
        return tokenizer.decode([id_]).strip() or str(tokenizer.inner.id_to_token(id_))


def open_filler(checkpoint: Checkpoint, engine: EngineConfig) -> Filler:
    """Load a checkpoint's net and tokenizer; an adapter is merged into its base."""
    tokenizer = open_tokenizer(checkpoint.tokenizer)
    device = open_device(engine.device)
    net = open_net(checkpoint.folder, device)
    check_masked_head(net.shape, checkpoint.folder)
    texts = new_masked_texts(tokenizer, net.shape.positions, checkpoint.folder)
    return Filler(net.to(torch_dtype(engine.precision, device)), texts)


class EncoderBatch:
    """The requests for embeddings and masks that a `Scheduler` runs; texts of different requests share a step.

    In a step every request has an equal share of the tokens, so small requests end early. With STEP_TOKENS of 512 and
    two requests, the one with 40 texts of 512 tokens computes one text a step; the other, with 20 texts of 10 tokens,
    is complete after the first step. The result is the text of Done: JSON for masks, and for embeddings float32 numbers
    in base64.
    """

    def __init__(self, embedder: Embedder, filler: Filler | None) -> None:
        self.embedder = embedder
        self.filler = filler
        self._step_tokens = STEP_TOKENS.get(embedder.net.head.device.type, STEP_TOKENS["cpu"])
        self._running: dict[int, Embedding | Filling] = {}

    def check(self, request: EncoderRequest) -> None:
        """Raise if the request cannot be done."""
        if isinstance(request, FillRequest) and self.filler is None:
            raise TextmillError("the model has no head for masked tokens, so it cannot fill them in")

    def add(self, number: int, request: EncoderRequest) -> None:
        """Let a request join at the next step."""
        if isinstance(request, EmbedRequest):
            vectors = np.zeros((len(request.ids), self.embedder.texts.dimension), np.float32)
            shortest_first = sorted(range(len(request.ids)), key=lambda text: len(request.ids[text]))
            self._running[number] = Embedding(request, vectors, shortest_first)
        else:
            assert self.filler is not None
            self._running[number] = Filling(request, self.filler, list(reversed(range(len(request.prompts)))))

    def step(self) -> list[tuple[int, Token | Done]]:
        """Compute some texts of each request; return the ends of the requests that are complete."""
        share = max(1, self._step_tokens // len(self._running))
        to_embed: list[tuple[Embedding, int]] = []
        for one in self._running.values():
            texts = _take(one, share)
            if isinstance(one, Embedding):
                to_embed += [(one, text) for text in texts]
            else:
                one.fill(texts)
        self._embed(to_embed)
        complete = {number: one for number, one in self._running.items() if not one.left}
        for number in complete:
            del self._running[number]
        return [(number, Done("stop", one.tokens, one.result())) for number, one in complete.items()]

    def _embed(self, texts: list[tuple[Embedding, int]]) -> None:
        """Compute texts of several requests together."""
        ids = [np.array(one.request.ids[text]) for one, text in texts]
        for (one, text), vector in zip(texts, self.embedder.embed_ids(ids), strict=True):
            one.vectors[text] = vector

    def drop(self, number: int, reason: FinishReason) -> Done | None:
        """Forget a request that ends early: it has no result."""
        self._running.pop(number, None)
        return None

    def fail(self, message: str) -> dict[int, Done]:
        """Forget all requests after a failed step."""
        self._running.clear()
        return {}


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
