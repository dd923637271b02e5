"""Accuracy, F1 and Matthews correlation of classes, from a confusion matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class ConfusionMatrix:
    """How often each class was predicted for each class."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.counts: NDArray[np.int64] = np.zeros((len(self.names), len(self.names)), np.int64)
        """Rows are the labels of the examples, columns the predictions."""

    def add(self, expected: Sequence[int] | NDArray[np.int64], predicted: Sequence[int] | NDArray[np.int64]) -> None:
        """Count pairs of a label and its prediction."""
        np.add.at(self.counts, (np.asarray(expected), np.asarray(predicted)), 1)

    @property
    def total(self) -> int:
        """The number of predictions."""
        return int(self.counts.sum())

    def accuracy(self) -> float:
        """The fraction of predictions that are right."""
        return float(np.trace(self.counts) / max(1, self.total))

    def f1_by_class(self) -> dict[str, float]:
        """F1 of each class that occurs as a label or as a prediction."""
        right = np.diag(self.counts)
        labels = self.counts.sum(1)
        predictions = self.counts.sum(0)
        found = {
            name: float(2 * right[number] / (labels[number] + predictions[number]))
            for number, name in enumerate(self.names)
            if labels[number] + predictions[number]
        }
        return found

    def macro_f1(self) -> float:
        """The mean of the classes' F1."""
        found = self.f1_by_class()
        return sum(found.values()) / max(1, len(found))

    def matthews(self) -> float:
        """Matthews correlation coefficient, for any number of classes; 0 if all labels or predictions are equal."""
        labels = self.counts.sum(1).astype(float)
        predictions = self.counts.sum(0).astype(float)
        total = float(self.total)
        right = float(np.trace(self.counts))
        spread = (total**2 - labels @ labels) * (total**2 - predictions @ predictions)
        return float((right * total - labels @ predictions) / math.sqrt(spread)) if spread > 0 else 0.0
