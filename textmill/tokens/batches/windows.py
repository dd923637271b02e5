"""Every token of a store asked exactly once, in its own order: for losses on a whole split."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from textmill.tokens.batches.batch import IGNORED, Batch
from textmill.tokens.batches.layout import check_ids
from textmill.tokens.store import TokenStore


def window_count(store: TokenStore, *, length: int, stride: int) -> int:
    """How many windows cover the store."""
    return 1 + max(0, -(-(store.tokens - length) // stride)) if store.tokens else 0


def window_batches(
    store: TokenStore, *, length: int, stride: int, batch: int, first: int, vocab: int | None = None
) -> Iterator[Batch]:
    """Windows of `length`, `stride` apart, over the stream that begins with the token `first`.

    The first window asks all its tokens, later ones only the tokens no window before has asked, so each
    token of the store is asked once, with at least `length - stride` tokens of context where there are so many.
    """
    count = window_count(store, length=length, stride=stride)
    for begin in range(0, count, batch):
        samples = np.arange(begin, min(begin + batch, count), dtype=np.int64)
        inputs = np.full((len(samples), length), first, np.int32)
        labels = np.full((len(samples), length), IGNORED, np.int32)
        for row, sample in enumerate(samples.tolist()):
            start = sample * stride
            asked = store.ids[start : start + length]
            labels[row, : len(asked)] = asked
            inputs[row, 1 : len(asked)] = asked[:-1]
            if sample:
                inputs[row, 0] = store.ids[start - 1]
                labels[row, : length - stride] = IGNORED
        check_ids(labels[labels != IGNORED], vocab, store.prefix)
        yield Batch(inputs=inputs, labels=labels, samples=samples)
