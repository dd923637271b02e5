"""Whether one model is better: a paired test on the same examples, from per-item logs; and a test of groups of runs.

Both models answered the same questions, so what counts is where they differ: that is far less noisy than comparing two
accuracies with their intervals. Whether a setting is better than another is a different question: runs with several
seeds answer it (`compare_groups`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from textmill.errors import TextmillError
from textmill.evaluation.data_files import read_items
from textmill.evaluation.metrics import Interval, mean_loss_interval, t_p_value, t_quantile

FLIPS = 10_000
FLIPS_AT_ONCE = 100
FLIPS_SEED = 1234


@dataclass(frozen=True)
class PairedDifference:
    """How much better the second model is."""

    items: int
    first: float
    second: float
    """The mean of the metric over the items that both logs have; of a `loss`, its sum by the tokens of the first."""
    difference: float
    interval: Interval
    """95%, of the difference."""
    p_value: float
    """How often a difference at least as large comes about if both models are equally good."""
    only_first: int
    only_second: int
    """Items on which one of them is better."""


def compare_items(first: Path, second: Path, metric: str, task: str | None = None) -> PairedDifference:
    """Compare two per-item logs by one metric, such as acc; `task` chooses one of several in a log.

    The p-value is that of a sign-flip permutation test: if the models were equally good, either could have had either
    score of an item. Ties and scores between 0 and 1 are treated alike.
    """
    values = [_read(path, metric, task) for path in (first, second)]
    ids = [id_ for id_ in values[0] if id_ in values[1]]
    if len(ids) < 2:
        raise TextmillError(
            f"{first}, {second}: have {len(ids)} items with '{metric}' in common; compare logs of the same data"
        )
    scores = np.array([[one[id_] for id_ in ids] for one in values])
    tokens = _read(first, "tokens", task) if metric == "loss" else {}
    sizes = np.array([tokens.get(id_, 1.0) for id_ in ids])
    differences = scores[1] - scores[0]
    interval = mean_loss_interval(differences.tolist(), sizes.tolist())
    assert interval is not None
    changed = differences[differences != 0]
    dice = np.random.default_rng(FLIPS_SEED)
    as_large = 0
    for _ in range(0, FLIPS, FLIPS_AT_ONCE):
        signs = dice.integers(0, 2, (FLIPS_AT_ONCE, len(changed)), np.int8) * 2 - 1
        # Rounding must not make a sum that is as large look smaller.
        as_large += int((np.abs(signs @ changed) >= abs(changed.sum()) - 1e-9).sum())
    return PairedDifference(
        items=len(ids),
        first=float(scores[0].sum() / sizes.sum()),
        second=float(scores[1].sum() / sizes.sum()),
        difference=float(differences.sum() / sizes.sum()),
        interval=interval,
        p_value=(1 + as_large) / (1 + FLIPS),
        only_first=int((differences < 0).sum()),
        only_second=int((differences > 0).sum()),
    )


@dataclass(frozen=True)
class GroupDifference:
    """How much the mean of the second group is above that of the first."""

    difference: float
    interval: Interval
    """95%."""
    p_value: float


def compare_groups(first: Sequence[float], second: Sequence[float]) -> GroupDifference:
    """Welch's t-test of two groups of at least two values each, such as the losses of runs with several seeds."""
    groups = [np.array(one, np.float64) for one in (first, second)]
    errors = [float(one.var(ddof=1)) / len(one) for one in groups]  # squared, of the mean
    difference = float(groups[1].mean() - groups[0].mean())
    if not sum(errors):
        return GroupDifference(difference, (difference, difference), 0.0 if difference else 1.0)
    parts = sum(error**2 / (len(one) - 1) for error, one in zip(errors, groups, strict=True))
    freedom = sum(errors) ** 2 / parts
    half = t_quantile(freedom) * math.sqrt(sum(errors))
    p_value = t_p_value(difference / math.sqrt(sum(errors)), freedom)
    return GroupDifference(difference, (difference - half, difference + half), p_value)


def _read(path: Path, metric: str, task: str | None) -> dict[tuple[str, str], float]:
    """The metric of each item, by its task and id."""
    if not path.is_file():
        raise TextmillError(f"{path}: no such file; name a per-item log, RUN/evaluation/*.items.jsonl")
    rows = [record for _, record in read_items(path) if task in (None, record.get("task"))]
    return {(str(row.get("task")), str(row.get("id"))): float(row[metric]) for row in rows if metric in row}
