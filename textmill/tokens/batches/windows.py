"""Sliding windows over a complete store for its loss: every token is predicted exactly once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from textmill.tokens.batches.batch import IGNORED, Batch
from textmill.tokens.batches.layout import check_ids
from textmill.tokens.store import TokenStore


def count_windows(store: TokenStore, *, length: int, stride: int, first_input: int | None = 0) -> int:
    """Count the windows that cover the store; without `first_input` its first token is not predicted."""
    predicted = store.tokens - (first_input is None)
    return 1 + max(0, -(-(predicted - length) // stride)) if predicted > 0 else 0


def window_batches(
    store: TokenStore,
    *,
    length: int,
    stride: int,
    batch: int,
    first_input: int | None,
    vocab: int | None = None,
    samples: NDArray[np.int64] | None = None,
) -> Iterator[Batch]:
    """Yield windows of `length` tokens that start every `stride` tokens: all of them, or those that `samples` names.

    Inputs are the labels shifted by one; `first_input` is the input at the first token, which has none before it. If
    it is None, the first token is only an input.

    The first window has loss on all its tokens. Later windows have loss only on tokens that no earlier window
    predicted. Tokens after the first window have at least `length - stride` tokens of context. The ids 1 to 6 with
    length 4, stride 2 and first input 0 (- is -100):

        inputs  [0 1 2 3]  [2 3 4 5]
        labels  [1 2 3 4]  [- - 5 6]
    """
    if samples is None:
        samples = np.arange(count_windows(store, length=length, stride=stride, first_input=first_input), dtype=np.int64)
    first_label, pad = (1, int(store.ids[0])) if first_input is None and store.tokens else (0, first_input or 0)
    for begin in range(0, len(samples), batch):
        store.check_mapped()
        numbers = samples[begin : begin + batch]
        inputs = np.full((len(numbers), length), pad, np.int32)
        labels = np.full((len(numbers), length), IGNORED, np.int32)
        for row, sample in enumerate(numbers.tolist()):
            start = first_label + sample * stride
            ids = store.ids[start : start + length]
            labels[row, : len(ids)] = ids
            inputs[row, 1 : len(ids)] = ids[:-1]
            if start:
                inputs[row, 0] = store.ids[start - 1]
            if sample:
                labels[row, : max(0, length - stride)] = IGNORED
        check_ids(labels[labels != IGNORED], vocab, store.prefix)
        yield Batch(inputs=inputs, labels=labels, samples=numbers)
