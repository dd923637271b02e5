"""95% confidence intervals: how much a number would vary on other examples of the same kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

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
    """The interval of the mean loss per token, from the sums of independent windows or texts; None for a single one.

    A ratio of two sums, linearised: windows differ in their loss and in their number of tokens.
    """
    counts = np.asarray(tokens, np.float64)
    sums = np.asarray(losses, np.float64)[counts > 0]
    counts = counts[counts > 0]
    if len(counts) < 2:
        return None
    mean = sums.sum() / counts.sum()
    variance = len(counts) / (len(counts) - 1) * ((sums - mean * counts) ** 2).sum() / counts.sum() ** 2
    half = Z * math.sqrt(variance)
    return float(mean - half), float(mean + half)


def transform(interval: Interval | None, function: Callable[[float], float | None]) -> Interval | None:
    """An interval of a rising function of a number, such as its perplexity; None where that does not exist."""
    if interval is None:
        return None
    low, high = (function(end) for end in interval)
    return None if low is None or high is None else (low, high)
