"""A quality filter that is trained on a user's good and bad samples: logistic regression on hashed n-grams.

The features are fastText's: words, pairs of words, and characters in runs of four. numpy hashes and sums them for all
words of a text at once, so that no package and no compiler is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.corpus.clean.filters import find_words
from textmill.errors import TextmillError
from textmill.storage.files import atomic_writer

BUCKET_BITS = 18
BUCKETS = 1 << BUCKET_BITS
MAX_CHARACTERS = 20_000
"""A longer text is judged by its beginning."""
MAX_SAMPLES = 20_000
"""Texts of each kind that are used."""
MIN_SAMPLES = 20
"""With fewer texts of a kind nothing can be measured."""
HELD_OUT = 5
"""One text in this many is held out, to measure the filter."""
STEPS = 60
LEARNING_RATE = 0.3
WEIGHT_DECAY = 1e-4
CHARACTERS = 4
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 0xA24BAED4963EE407, 0x9FB21C651E98DF25], np.uint64)
Weights = NDArray[np.float32]


@dataclass(frozen=True)
class QualityFigures:
    """How well the filter separates the samples that it was not trained on."""

    samples: int
    right: int
    kept: int
    """Samples that the filter keeps."""
    kept_good: int
    good: int

    def __str__(self) -> str:
        return (
            f"of {self.samples:,} held-out samples {self.right / self.samples:.1%} are judged right; "
            f"precision {self.kept_good / max(1, self.kept):.1%} ({self.kept_good:,} of {self.kept:,} kept samples are "
            f"good), recall {self.kept_good / self.good:.1%}"
        )


def train_quality(good: Sequence[str], bad: Sequence[str]) -> tuple[Weights, QualityFigures]:
    """The weights, trained on four fifths of the samples, and how well they judge the others."""
    for name, texts in (("good", good), ("bad", bad)):
        if len(texts) < MIN_SAMPLES:
            raise TextmillError(
                f"corpus.quality_{name}: found {len(texts):,} texts, at least {MIN_SAMPLES} are needed; name more"
            )
    features = [_features(text) for text in [*good, *bad]]
    is_good = np.repeat([1.0, 0.0], [len(good), len(bad)])
    # The order of the samples decides which are held out; both kinds are spread alike.
    is_held_out = np.concatenate([np.arange(len(texts)) % HELD_OUT == HELD_OUT - 1 for texts in (good, bad)])
    weights = _fit([features[row] for row in np.flatnonzero(~is_held_out)], is_good[~is_held_out])
    kept = np.array([_score(weights, features[row]) >= 0 for row in np.flatnonzero(is_held_out)])
    truth = is_good[is_held_out] == 1
    figures = QualityFigures(
        len(truth), int((kept == truth).sum()), int(kept.sum()), int((kept & truth).sum()), int(truth.sum())
    )
    return weights, figures


def save_quality(weights: Weights, path: Path) -> None:
    """Write the weights for the workers."""
    with atomic_writer(path) as file:
        np.save(file, weights)


def open_quality(path: Path) -> Weights:
    """The weights that were written."""
    weights: Weights = np.load(path)
    return weights


def is_like_good(weights: Weights, text: str) -> bool:
    """Whether a text is rather like the good samples than like the bad ones."""
    return _score(weights, _features(text)) >= 0


def _features(text: str) -> NDArray[np.int64]:
    """The bucket of each feature that a text has, each once; 0 is the constant."""
    text = text[:MAX_CHARACTERS].lower()
    words = find_words(text).hashes()
    pairs = words[:-1] * _FACTORS[0] + words[1:]
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    count = max(0, len(codes) - CHARACTERS + 1)
    runs = np.zeros(count, np.uint64)
    for place in range(CHARACTERS):
        runs += (codes[place : place + count] + np.uint64(1)) * _FACTORS[place]
    runs ^= runs >> np.uint64(29)
    hashes = np.concatenate([words * _FACTORS[1], pairs * _FACTORS[2], runs * _FACTORS[3]])
    buckets = np.unique((hashes >> np.uint64(64 - BUCKET_BITS)).astype(np.int64))
    return np.concatenate([[0], buckets])


def _score(weights: Weights, features: NDArray[np.int64]) -> float:
    """Above 0 if a text is more likely to be good than bad."""
    return float(weights[features].sum(dtype=np.float64))


def _sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-np.clip(values, -30, 30)))


def _fit(features: list[NDArray[np.int64]], is_good: NDArray[np.float64]) -> Weights:
    """Adam on the loss of all samples; both kinds weigh the same, whatever their numbers."""
    sizes = np.array([len(one) for one in features])
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    flat = np.concatenate(features)
    scale = 1 / np.sqrt(sizes)
    importance = np.where(is_good == 1, 0.5 / is_good.sum(), 0.5 / (1 - is_good).sum())
    weights = np.zeros(BUCKETS)
    mean = np.zeros(BUCKETS)
    square = np.zeros(BUCKETS)
    for step in range(1, STEPS + 1):
        scores = np.add.reduceat(weights[flat], starts) * scale
        errors = (_sigmoid(scores) - is_good) * importance * scale
        gradient = np.bincount(flat, np.repeat(errors, sizes), BUCKETS) + WEIGHT_DECAY * weights
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.99 * square + 0.01 * gradient**2
        weights -= LEARNING_RATE * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.99**step)) + 1e-8)
    return weights.astype(np.float32)
