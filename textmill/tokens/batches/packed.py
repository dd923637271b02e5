"""The packed layout: documents shuffled each epoch, joined into one stream, cut into windows; a window's place is arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.tokens.batches.batch import Batch
from textmill.tokens.batches.order import order_of
from textmill.tokens.store import TokenStore

_DOCUMENTS, _WINDOWS = 1, 2


@dataclass(frozen=True)
class Epoch:
    """How one pass over the store is laid out."""

    starts: NDArray[np.int64]
    """Where each shuffled sequence begins in the store."""
    ends: NDArray[np.int64]
    """Where each shuffled sequence ends in the epoch's stream."""
    windows: NDArray[np.int64]
    """The order in which the stream's windows are taken."""


class PackedBatches:
    """batch_at(step) as a pure function of (store, length, batch, seed, step)."""

    def __init__(self, store: TokenStore, *, length: int, batch: int, seed: int) -> None:
        if store.tokens < 2:
            raise TextmillError(f"{store.prefix}: {store.tokens} tokens; there is nothing to learn from; add text")
        self.store, self.length, self.batch, self.seed = store, length, batch, seed
        self.windows = -(-store.tokens // length)
        """Windows an epoch; the last one runs on into the epoch's beginning, so that no token is left out."""
        self.epoch = lru_cache(maxsize=2)(self._epoch)

    def batch_at(self, step: int, part: slice = slice(None)) -> Batch:
        """The global batch of a step, or the samples of it that `part` names."""
        samples = np.arange(step * self.batch, (step + 1) * self.batch, dtype=np.int64)[part]
        rows = np.empty((len(samples), self.length + 1), np.int32)
        for row, sample in zip(rows, samples.tolist(), strict=True):
            epoch, place = divmod(sample, self.windows)
            self._fill(row, self.epoch(epoch), place)
        return Batch(inputs=rows[:, :-1], labels=rows[:, 1:], samples=samples)

    def _epoch(self, number: int) -> Epoch:
        order = order_of(len(self.store), self.seed, _DOCUMENTS, number)
        lengths = self.store.lengths.astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        return Epoch(starts[order], np.cumsum(lengths[order]), order_of(self.windows, self.seed, _WINDOWS, number))

    def _fill(self, row: NDArray[np.int32], epoch: Epoch, place: int) -> None:
        """Copy one window, sequence by sequence."""
        position = int(epoch.windows[place]) * self.length
        filled, tokens = 0, self.store.tokens
        sequence = int(np.searchsorted(epoch.ends, position, side="right"))
        while filled < len(row):
            if position >= tokens:
                position, sequence = position - tokens, 0
            left = int(epoch.ends[sequence]) - position
            if left > 0:
                count = min(left, len(row) - filled)
                before = int(epoch.ends[sequence - 1]) if sequence else 0
                start = int(epoch.starts[sequence]) + position - before
                row[filled : filled + count] = self.store.ids[start : start + count]
                filled, position = filled + count, position + count
            sequence += 1
