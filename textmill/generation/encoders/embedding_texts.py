"""Texts as the token ids that an embedding is computed from; without torch, since the server encodes texts too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.config import EmbedConfig
from textmill.errors import TextmillError
from textmill.models import Shape, open_family
from textmill.models.pooling import Pooling, read_pooling
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class EncodedText:
    """The ids of a text, and how many tokens it had before it was truncated."""

    ids: Ids
    tokens: int

    @property
    def truncated(self) -> bool:
        """Whether it lost tokens."""
        return self.tokens > len(self.ids)


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer with the special tokens around a text and the longest text."""

    tokenizer: TextTokenizer
    longest: int
    """In tokens, special ones included."""
    dimension: int
    """Numbers in an embedding."""
    first: tuple[int, ...] = ()
    """[CLS], for a masked model."""
    last: tuple[int, ...] = ()
    """[SEP], for a masked model."""

    def encode(self, texts: list[str]) -> list[EncodedText]:
        """The ids of each text, special tokens included; tokens at the end of a long one are left out."""
        return [self.surround(ids) for ids in self.tokenizer.encode_many(texts)]

    def surround(self, ids: Ids) -> EncodedText:
        """One text, from its tokens without special ones."""
        special = len(self.first) + len(self.last)
        kept = np.concatenate([self.first, ids[: self.longest - special], self.last]).astype(np.int64)
        if not len(kept):  # an empty text for a model without special tokens
            return EncodedText(np.array([self.tokenizer.end]), 1)
        return EncodedText(kept, len(ids) + special)


def format_vector(vector: NDArray[np.float32]) -> str:
    """A vector as JSON; nine digits are enough to read the same numbers back."""
    return "[" + ", ".join(["%.9g"] * len(vector)) % tuple(vector.tolist()) + "]"


def can_embed(shape: Shape) -> bool:
    """Whether several texts in a row do not affect each other in this model."""
    return "documents" in open_family(shape.family).BATCH_FIELDS


def new_text_encoder(
    shape: Shape, tokenizer: TextTokenizer, config: EmbedConfig, folder: Path
) -> tuple[TextEncoder, Pooling]:
    """The encoder and the pooling of a model, with the settings that override those of its folder."""
    family = open_family(shape.family)
    if not can_embed(shape):
        raise TextmillError(f"{folder}: a {shape.family} cannot read several texts in a row, so there is no embedding")
    if tokenizer.vocab > shape.vocab:
        raise TextmillError(
            f"{folder}: the tokenizer has {tokenizer.vocab:,} tokens, but the embedding has only {shape.vocab:,} rows; "
            "put the tokenizer that the model was trained with into this folder"
        )
    pooling = _pooling_of(folder, config)
    if (config.length or 0) > shape.positions:
        raise TextmillError(f"embed.length: {config.length:,} is more than the model's {shape.positions:,}; lower it")
    longest = min(pooling.longest or shape.positions, shape.positions)
    first: Sequence[int] = ()
    last: Sequence[int] = ()
    if family.OBJECTIVE == "masked":
        if tokenizer.classifier is None:
            raise TextmillError(f"{folder}: its tokenizer has no [CLS] token; use the one the model was trained with")
        first = [tokenizer.classifier]
        last = [tokenizer.separator]
    elif pooling.kind == "cls":
        raise TextmillError(f"embed.pooling: {folder} has no [CLS] token at the start of a text; set it to mean")
    if longest <= len(first) + len(last):
        raise TextmillError(f"embed.length: {longest} has no space for a text; raise it")
    return TextEncoder(tokenizer, longest, shape.width, tuple(first), tuple(last)), pooling


def _pooling_of(folder: Path, config: EmbedConfig) -> Pooling:
    own = read_pooling(folder, None if config.pooling == "auto" else config.pooling)
    normalize = own.normalize if config.normalize is None else config.normalize
    return Pooling(own.kind, normalize, config.length or own.longest)
