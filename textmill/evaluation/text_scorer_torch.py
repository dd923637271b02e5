"""What the scorers of all torch nets share: encoding of texts, and facts about the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from textmill.checkpoints.folders import Checkpoint
from textmill.errors import TextmillError
from textmill.evaluation.share import ALL_BATCHES, Share
from textmill.evaluation.task import Pair, Score
from textmill.models.base_torch import BaseNet
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

ENCODED_TEXTS = 4096
"""Texts that are encoded at a time."""


@dataclass(frozen=True)
class TextScorer(ABC):
    """A net with its tokenizer; see Scorer in task.py."""

    checkpoint: Checkpoint
    net: BaseNet
    tokenizer: TextTokenizer
    batch: int
    """Windows in one forward pass."""
    dtype: torch.dtype = torch.float32
    share: Share = ALL_BATCHES
    """The part of the work that this process does."""

    @property
    def positions(self) -> int:
        """The longest input of the model, in tokens."""
        return int(self.net.shape.positions)

    @property
    def vocab(self) -> int:
        """How many tokens the model knows."""
        return int(self.net.shape.vocab)

    @property
    def precision(self) -> str:
        """The arithmetic it computes in."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """Where the net is."""
        return str(self.net.head.device)

    @abstractmethod
    def score_tokens(self, pairs: Sequence[Pair]) -> list[Score]:
        """Score each (context, continuation) of token ids."""

    def score_texts(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        """Score each (context, continuation), encoded as one text."""
        return self.score_tokens(self.encode_pairs(pairs))

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Pair]:
        """The token ids of each (context, continuation), encoded as one text."""
        encoded: list[Pair] = []
        for begin in range(0, len(pairs), ENCODED_TEXTS):
            block = [_move_spaces(*pair) for pair in pairs[begin : begin + ENCODED_TEXTS]]
            contexts = list(dict.fromkeys(context for context, _ in block))
            whole_texts = self.tokenizer.encode_many([context + continuation for context, continuation in block])
            ids_by_context = dict(zip(contexts, self.tokenizer.encode_many(contexts), strict=True))
            for (context, _), ids in zip(block, whole_texts, strict=True):
                context_ids = ids_by_context[context]
                encoded.append((context_ids.tolist(), ids[len(context_ids) :].tolist()))
        return encoded

    def check_lengths(self, pairs: Sequence[Pair]) -> None:
        """Refuse a continuation without tokens, or one that is longer than the model's positions."""
        for _, continuation in pairs:
            if not 0 < len(continuation) <= self.positions:
                raise TextmillError(
                    f"{self.checkpoint.folder}: a continuation has {len(continuation):,} tokens; "
                    f"the model scores from 1 to {self.positions:,}"
                )


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    """Spaces at the end of the context belong to the first token of the continuation: ("A: ", "b") -> ("A:", " b")."""
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation


def check_ids(lowest: int, highest: int, vocab: int, where: Path) -> None:
    """Refuse ids that the model does not know."""
    if highest >= vocab or lowest < 0:
        raise TextmillError(
            f"{where}: token ids from {lowest} to {highest} found, the model knows {vocab:,}; "
            f"tokenize with the model's own tokenizer"
        )
