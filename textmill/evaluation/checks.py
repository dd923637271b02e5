"""Warnings about figures that mean nothing: untrained weights, or a tokenizer that does not belong to the model."""

from __future__ import annotations

import math

from textmill.errors import warn
from textmill.evaluation.task import Scorer
from textmill.storage.files import format_path

UNTRAINED = 0.97
"""A mean loss above this fraction of log(vocabulary), the loss of guessing, is suspicious."""


def warn_if_untrained(scorer: Scorer, token_loss: float | None) -> None:
    """Warn if the model is no better than guessing among all tokens."""
    guessing = math.log(scorer.vocab)
    if token_loss is not None and token_loss > UNTRAINED * guessing:
        warn(
            f"{format_path(scorer.checkpoint.folder)}: its loss is {token_loss:.2f} per token, guessing among "
            f"{scorer.vocab:,} tokens has {guessing:.2f}; the weights look untrained, or the tokenizer is not the one "
            "that they were trained with"
        )


def warn_if_foreign_tokenizer(scorer: Scorer, end: int) -> None:
    """Warn if the end-of-text token or the size of the tokenizer does not fit the model's config.json."""
    tokenizer = scorer.tokenizer
    folder = format_path(scorer.checkpoint.folder)
    if end < scorer.vocab and end != tokenizer.end:
        warn(
            f"{folder}: config.json has {end} as end-of-text token, its tokenizer {tokenizer.end}; check that the "
            "tokenizer belongs to the model"
        )
    elif tokenizer.vocab < 0.9 * scorer.vocab:
        warn(
            f"{folder}: its tokenizer has {tokenizer.vocab:,} entries, the model {scorer.vocab:,}; check that the "
            "tokenizer belongs to the model"
        )
