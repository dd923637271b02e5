"""What the masked layout needs from a tokenizer: special tokens, words, and weights for masking."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from textmill.config import MaskedConfig
from textmill.errors import TextmillError
from textmill.tokens.batches.masking import MaskingRule
from textmill.tokens.token_counts import read_token_counts
from textmill.tokens.vocabulary.tokenizer import TextTokenizer
from textmill.tokens.vocabulary.word_starts import find_word_starts


@dataclass(frozen=True)
class MaskedTokens:
    """The special tokens of a masked model, and its masking rule."""

    cls: int
    sep: int
    pad: int
    begin: int | None
    """The token that may be at the start of each document in the store; samples do not contain it."""
    end: int
    """The token that may be at the end of each document in the store; samples do not contain it."""
    rule: MaskingRule

    @property
    def vocab(self) -> int:
        """The number of token ids."""
        return len(self.rule.special)


def masked_tokens_of(tokenizer: TextTokenizer, settings: MaskedConfig) -> MaskedTokens:
    """The special tokens of a tokenizer, and the masking rule of the settings."""
    mask = tokenizer.mask
    cls = tokenizer.classifier
    if mask is None or cls is None:
        missing = "mask token such as [MASK] or <mask>" if mask is None else "token such as [CLS] or <s>"
        raise TextmillError(
            f"the tokenizer has no {missing}, which train.layout=masked needs; set tokenizer.kind=wordpiece, or "
            f"tokenizer.kind=unigram with tokenizer.special_tokens=<mask>, and make the tokenizer again"
        )
    pad = tokenizer.end if tokenizer.pad is None else tokenizer.pad
    return MaskedTokens(
        cls=cls,
        sep=tokenizer.separator,
        pad=pad,
        begin=tokenizer.begin,
        end=tokenizer.end,
        rule=_masking_rule(tokenizer, mask, settings),
    )


def _masking_rule(tokenizer: TextTokenizer, mask: int, settings: MaskedConfig) -> MaskingRule:
    word_starts, special = find_word_starts(tokenizer)
    if special.all():
        raise TextmillError("the tokenizer has only special tokens, so nothing can be masked; fit one on text")
    weights = None
    if settings.counts is not None:
        counts = read_token_counts(Path(settings.counts), tokenizer.fingerprint)
        weights = np.maximum(counts, 1).astype(np.float64) ** -settings.counts_power
    return MaskingRule(
        mask=mask,
        special=special,
        word_starts=word_starts if settings.whole_words else None,
        probability=settings.probability,
        max_predictions=settings.max_predictions,
        max_ngram=settings.max_ngram,
        weights=weights,
    )
