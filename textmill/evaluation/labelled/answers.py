"""The best answer to a question, from the logits of all windows of its context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from textmill.config.evaluation import AnswersConfig
from textmill.tokens.labelled.encoding import NO_SPAN, Sample

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Answer:
    """A part of a context, or no answer."""

    text: str
    score: float
    """The sum of the logits of its first and last token."""
    no_answer_score: float
    """The lowest such sum of [CLS] over all windows."""


def find_best_answer(
    context: str, samples: Sequence[Sample], logits: Sequence[Logits], rule: AnswersConfig, *, no_answer: bool
) -> Answer:
    """The span with the highest score in any window; empty if `no_answer` is allowed and scores higher.

    `logits` are [2, tokens] for each window: of the first and of the last token.
    """
    none = min(float(one[0, 0] + one[1, 0]) for one in logits)
    best = -np.inf
    span = (0, 0)
    for sample, one in zip(samples, logits, strict=True):
        assert sample.spans is not None
        places = np.flatnonzero(sample.spans[:, 0] != NO_SPAN)
        if not len(places):
            continue
        firsts, lasts = (places[np.argsort(-one[side, places], kind="stable")[: rule.n_best]] for side in (0, 1))
        lengths = lasts[None, :] - firsts[:, None] + 1
        scores = np.where(
            (lengths >= 1) & (lengths <= rule.max_tokens), one[0, firsts][:, None] + one[1, lasts][None, :], -np.inf
        )
        row, column = np.unravel_index(int(scores.argmax()), scores.shape)
        if scores[row, column] > best:
            best = float(scores[row, column])
            span = int(sample.spans[firsts[row], 0]), int(sample.spans[lasts[column], 1])
    chosen = "" if no_answer and none - best > rule.no_answer_margin else context[span[0] : span[1]]
    return Answer(chosen, best, none)
