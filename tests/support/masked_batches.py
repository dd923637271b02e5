"""Batches for masked language models: several sentence pairs packed in each sample, and padding."""

from __future__ import annotations

import numpy as np

from textmill.tokens.batches.batch import IGNORED, Batch

LENGTHS = ([24], [9, 8, 7], [14, 10], [20], [5, 6, 6], [11, 12], [24], [7, 17])
"""Tokens of the pairs in each sample; the rest of its 24 tokens is padding."""
MASK, VOCAB = 4, 150


def masked_batch(step: int, *, pairs: bool = True) -> Batch:
    """The class says whether the second segment has large ids; masked tokens are like those near them."""
    dice = np.random.default_rng(step)
    rows, length = len(LENGTHS), sum(LENGTHS[0])
    inputs, types, documents = (np.zeros((rows, length), np.int32) for _ in range(3))
    labels, classes = (np.full((rows, length), IGNORED, np.int32) for _ in range(2))
    for row, counts in enumerate(LENGTHS):
        start = 0
        for number, count in enumerate(counts, 1):
            part, second = slice(start, start + count), slice(start + count // 2, start + count)
            kind = int(dice.integers(2))
            inputs[row, part] = 5 + 4 * int(dice.integers(6)) + np.arange(count) % 2
            inputs[row, second] += 60 * kind
            documents[row, part], types[row, second], classes[row, start] = number, 1, kind
            masked = start + 1 + dice.choice(count - 1, 1 + count // 7, replace=False)
            labels[row, masked] = inputs[row, masked]
            inputs[row, masked] = MASK
            start += count
    samples = np.arange(step * rows, (step + 1) * rows)
    return Batch(inputs, labels, samples, documents, types, classes if pairs else None)


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Return some samples of a batch, with all its fields."""
    return Batch(**{name: values[rows] for name, values in vars(batch).items() if values is not None})
