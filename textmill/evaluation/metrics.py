"""Perplexities and bits per byte from a summed loss, and confidence intervals.

A loss of 3,000 nats over 1,000 tokens, 700 words and 4,000 bytes is a token perplexity of exp(3000 / 1000) = 20.1, a
word perplexity of exp(3000 / 700) = 72.7 and 3000 / 4000 / ln 2 = 1.08 bits per byte. Only the last two can be compared
between models with different tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.evaluation.task import LossPart

MAX_MEAN_LOSS = math.log(1e15)
"""A perplexity above e to this is left out: in text without spaces a "word" is as long as a page."""


def compute_metrics(loss: float, counts: dict[str, int], model: str) -> dict[str, float | None]:
    """Perplexities from the summed loss in nats and the number of tokens, and of words and bytes where they are
    known."""
    check_finite(loss, model)
    metrics: dict[str, float | None] = {
        "loss": loss / counts["tokens"],
        "token_perplexity": perplexity_of(loss, counts["tokens"]),
    }
    if "words" in counts:
        metrics["word_perplexity"] = perplexity_of(loss, counts["words"])
    if "bytes" in counts:
        metrics["byte_perplexity"] = perplexity_of(loss, counts["bytes"])
        metrics["bits_per_byte"] = loss / counts["bytes"] / math.log(2) if counts["bytes"] else None
    return metrics


def check_finite(losses: float | NDArray[np.float64], model: Path | str) -> None:
    """Refuse losses that are NaN or infinite: what would be computed from them is no measurement."""
    values = np.asarray(losses)
    if not np.isfinite(values).all():
        found = values[~np.isfinite(values)].flat[0]
        raise TextmillError(
            f"{model}: its loss is {found}, not a finite number; the weights are damaged or training diverged; "
            "use an earlier --step"
        )


def metric_intervals(mean: Interval | None, counts: dict[str, int]) -> dict[str, Interval]:
    """The intervals of `compute_metrics` from that of the mean loss per token."""
    tokens = counts["tokens"]
    intervals = {"loss": mean, "token_perplexity": transform(mean, lambda loss: perplexity_of(loss * tokens, tokens))}
    if counts.get("words"):
        intervals["word_perplexity"] = transform(mean, lambda loss: perplexity_of(loss * tokens, counts["words"]))
    if counts.get("bytes"):
        intervals["byte_perplexity"] = transform(mean, lambda loss: perplexity_of(loss * tokens, counts["bytes"]))
        intervals["bits_per_byte"] = transform(mean, lambda loss: loss * tokens / counts["bytes"] / math.log(2))
    return {name: interval for name, interval in intervals.items() if interval is not None}


def perplexity_of(loss: float, count: int) -> float | None:
    """The perplexity of a summed loss; None if it is beyond all numbers."""
    return math.exp(loss / count) if count and loss / count < MAX_MEAN_LOSS else None


def format_number(key: str, value: float | None) -> str:
    """A metric as text: accuracies in percent."""
    if value is None:
        return "-"
    if key.startswith("acc") or key.endswith("accuracy") or key == "chance":
        return f"{value:.1%}"
    return f"{value:,.2f}" if value >= 100 else f"{value:.4f}"


Z = 1.959964
"""The 97.5% quantile of the normal distribution."""
Interval = tuple[float, float]


def proportion_interval(correct: int, count: int) -> Interval:
    """Wilson's interval of a fraction."""
    share = correct / count
    denominator = 1 + Z**2 / count
    middle = (share + Z**2 / (2 * count)) / denominator
    half = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2)) / denominator
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_loss_interval(losses: Sequence[float], tokens: Sequence[int]) -> Interval | None:
    """The interval of the mean loss per token, from the sums of independent texts; None for a single one.

    A ratio of two sums, linearised: texts differ in their loss and in their number of tokens.
    """
    counts = np.asarray(tokens, np.float64)
    sums = np.asarray(losses, np.float64)[counts > 0]
    counts = counts[counts > 0]
    if len(counts) < 2:
        return None
    mean = sums.sum() / counts.sum()
    variance = len(counts) / (len(counts) - 1) * ((sums - mean * counts) ** 2).sum() / counts.sum() ** 2
    half = t_quantile(len(counts) - 1) * math.sqrt(variance)
    return float(mean - half), float(mean + half)


NODES, NODE_WEIGHTS = np.polynomial.legendre.leggauss(256)


def t_p_value(t: float, freedom: float) -> float:
    """How often Student's t is at least as far from 0: an integral of its density over the angle atan(t / root of
    freedom), by Gauss-Legendre."""
    end = math.atan(min(abs(t), 40.0 if freedom > 100 else math.inf) / math.sqrt(freedom))
    density = np.cos((NODES + 1) / 2 * end) ** (freedom - 1)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    return max(0.0, 1 - scale * end * float(NODE_WEIGHTS @ density))


@cache
def t_quantile(freedom: float) -> float:
    """The 97.5% quantile of Student's t, by bisection."""
    low, high = 1.0, 64.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if t_p_value(middle, freedom) > 0.05 else (low, middle)
    return low


FEW_DOCUMENTS = 10
"""With fewer documents than this, blocks of the text are compared instead."""
BLOCKS = 20
"""As many blocks: long enough that a subject or a style changes between them more than within."""


def document_interval(parts: Sequence[LossPart]) -> tuple[Interval | None, str]:
    """The interval of the mean loss per token, and what it is computed from.

    The tokens of a document resemble one another, so its windows are no independent measurements: documents are. A text
    of few documents is divided into blocks.
    """
    numbers = np.array([part.document for part in parts], np.int64)
    losses = np.array([part.loss for part in parts])
    tokens = np.array([part.tokens for part in parts], np.int64)
    _, units = np.unique(numbers, return_inverse=True)
    documents = int(units.max(initial=-1)) + 1
    name = "documents"
    if documents < FEW_DOCUMENTS and len(parts) > documents:
        middles = np.cumsum(tokens) - tokens / 2
        count = min(BLOCKS, len(parts))
        units = np.minimum((middles * count / tokens.sum()).astype(np.int64), count - 1)
        name = "blocks of the text"
    interval = mean_loss_interval(np.bincount(units, losses).tolist(), np.bincount(units, tokens).tolist())
    return interval, f"95%, from the spread of {len(np.unique(units)):,} {name}"


def transform(interval: Interval | None, function: Callable[[float], float | None]) -> Interval | None:
    """An interval of a rising function of a number, such as its perplexity; None where that does not exist."""
    if interval is None:
        return None
    low, high = (function(end) for end in interval)
    return None if low is None or high is None else (low, high)
