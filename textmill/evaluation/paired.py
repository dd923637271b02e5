"""A paired test of two models on the same examples, from their per-item logs.

Both models answered the same questions, so what counts is where they differ: that is far less noisy than comparing two
accuracies with their intervals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from textmill.errors import TextmillError
from textmill.evaluation.data_files import read_items
from textmill.evaluation.metrics import Interval, t_quantile

FLIPS = 10_000
FLIPS_SEED = 1234


@dataclass(frozen=True)
class PairedDifference:
    """How much better the second model is."""

    items: int
    first: float
    second: float
    """The mean of the metric over the items that both logs have."""
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
    differences = scores[1] - scores[0]
    mean = float(differences.mean())
    half = t_quantile(len(ids) - 1) * float(differences.std(ddof=1)) / math.sqrt(len(ids))
    changed = differences[differences != 0]
    signs = np.random.default_rng(FLIPS_SEED).integers(0, 2, (FLIPS, len(changed)), np.int8) * 2 - 1
    # Rounding must not make a sum that is as large look smaller.
    as_large = np.abs(signs @ changed) >= abs(changed.sum()) - 1e-9
    return PairedDifference(
        items=len(ids),
        first=float(scores[0].mean()),
        second=float(scores[1].mean()),
        difference=mean,
        interval=(mean - half, mean + half),
        p_value=float((1 + as_large.sum()) / (1 + FLIPS)),
        only_first=int((differences < 0).sum()),
        only_second=int((differences > 0).sum()),
    )


def _read(path: Path, metric: str, task: str | None) -> dict[tuple[str, str], float]:
    """The metric of each item, by its task and id."""
    if not path.is_file():
        raise TextmillError(f"{path}: no such file; name a per-item log, RUN/evaluation/*.items.jsonl")
    rows = [record for _, record in read_items(path) if task in (None, record.get("task"))]
    return {(str(row.get("task")), str(row.get("id"))): float(row[metric]) for row in rows if metric in row}
