"""Exact match and F1 of answers, by the rules of SQuAD's official scripts for versions 1.1 and 2.0."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from textmill.tokens.labelled import NO_SPAN, Sample

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without punctuation and English articles, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, expected: str) -> float:
    """1 if two answers are equal after normalisation."""
    return float(normalize_answer(answer) == normalize_answer(expected))


def f1_score(answer: str, expected: str, *, version_2: bool) -> float:
    """F1 of the words of two answers; in version 2, an empty one equals only an empty one."""
    answer_words = normalize_answer(answer).split()
    expected_words = normalize_answer(expected).split()
    if version_2 and not (answer_words and expected_words):
        return float(answer_words == expected_words)
    shared = sum((Counter(answer_words) & Counter(expected_words)).values())
    return 2 * shared / (len(answer_words) + len(expected_words)) if shared else 0.0


class AnswerScores:
    """Sums of exact match and F1 over questions, also of those with and without an answer."""

    def __init__(self, *, version_2: bool) -> None:
        self.version_2 = version_2
        self.exact: dict[bool, float] = {True: 0.0, False: 0.0}
        self.f1: dict[bool, float] = {True: 0.0, False: 0.0}
        self.counts: dict[bool, int] = {True: 0, False: 0}

    def add(self, answer: str, expected: Sequence[str]) -> None:
        """Count the best score of an answer over all accepted ones; none accepted means that there is no answer."""
        has_answer = bool(expected)
        accepted = [text for text in expected if normalize_answer(text)] if self.version_2 else list(expected)
        accepted = accepted or [""]
        self.counts[has_answer] += 1
        self.exact[has_answer] += max(exact_match(answer, text) for text in accepted)
        self.f1[has_answer] += max(f1_score(answer, text, version_2=self.version_2) for text in accepted)

    def metrics(self) -> dict[str, float]:
        """Exact match and F1 in percent, as the official scripts print them."""
        total = max(1, sum(self.counts.values()))
        metrics = {"exact_match": 100 * sum(self.exact.values()) / total, "f1": 100 * sum(self.f1.values()) / total}
        if self.version_2:
            for name, has_answer in (("has_answer", True), ("no_answer", False)):
                count = max(1, self.counts[has_answer])
                metrics[f"{name}_exact_match"] = 100 * self.exact[has_answer] / count
                metrics[f"{name}_f1"] = 100 * self.f1[has_answer] / count
        return metrics


Logits = NDArray[np.float32]
N_BEST = 20
"""The most likely first and last tokens of each window that are combined."""
MAX_TOKENS = 30
"""Most tokens of an answer, as in run_qa."""


def find_best_answer(context: str, samples: Sequence[Sample], logits: Sequence[Logits], *, no_answer: bool) -> str:
    """The span with the highest score in any window, the sum of the logits of its first and last token.

    It is empty if `no_answer` is allowed and the lowest such sum of [CLS] over all windows is higher. `logits` are
    [2, tokens] for each window: of the first and of the last token.
    """
    no_answer_score = min(float(one[0, 0] + one[1, 0]) for one in logits)
    best = -np.inf
    span = (0, 0)
    for sample, one in zip(samples, logits, strict=True):
        assert sample.spans is not None
        places = np.flatnonzero(sample.spans[:, 0] != NO_SPAN)
        if not len(places):
            continue
        firsts, lasts = (places[np.argsort(-one[side, places], kind="stable")[:N_BEST]] for side in (0, 1))
        lengths = lasts[None, :] - firsts[:, None] + 1
        scores = np.where(
            (lengths >= 1) & (lengths <= MAX_TOKENS), one[0, firsts][:, None] + one[1, lasts][None, :], -np.inf
        )
        row, column = np.unravel_index(int(scores.argmax()), scores.shape)
        if scores[row, column] > best:
            best = float(scores[row, column])
            span = int(sample.spans[firsts[row], 0]), int(sample.spans[lasts[column], 1])
    return "" if no_answer and no_answer_score > best else context[span[0] : span[1]]
