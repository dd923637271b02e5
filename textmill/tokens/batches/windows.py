"""Sliding windows over a complete store for its loss: every token is predicted exactly once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from textmill.tokens.batches.batch import IGNORED, Batch
from textmill.tokens.batches.layout import check_ids
from textmill.tokens.store import TokenStore


def count_windows(store: TokenStore, *, length: int, stride: int) -> int:
    """Count the windows that cover the store."""
    return 1 + max(0, -(-(store.tokens - length) // stride)) if store.tokens else 0


def window_batches(
    store: TokenStore, *, length: int, stride: int, batch: int, first_input: int, vocab: int | None = None
) -> Iterator[Batch]:
    """Yield windows of `length` tokens that start every `stride` tokens.

    Inputs are the labels shifted by one; `first_input` is the input at the first token, which has none before it.

    The first window has loss on all its tokens. Later windows have loss only on tokens that no earlier window
    predicted. Tokens after the first window have at least `length - stride` tokens of context.
    """
    count = count_windows(store, length=length, stride=stride)
    for first_window in range(0, count, batch):
        samples = np.arange(first_window, min(first_window + batch, count), dtype=np.int64)
        inputs = np.full((len(samples), length), first_input, np.int32)
        labels = np.full((len(samples), length), IGNORED, np.int32)
        for row, sample in enumerate(samples.tolist()):
            start = sample * stride
            ids = store.ids[start : start + length]
            labels[row, : len(ids)] = ids
            inputs[row, 1 : len(ids)] = ids[:-1]
            if sample:
                inputs[row, 0] = store.ids[start - 1]
                labels[row, : length - stride] = IGNORED
        check_ids(labels[labels != IGNORED], vocab, store.prefix)
        yield Batch(inputs=inputs, labels=labels, samples=samples)
