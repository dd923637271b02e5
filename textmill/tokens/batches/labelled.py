"""The labelled layout: one encoded example, or one window of it, in each sample, with the labels of its task."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.tokens.batches.batch import IGNORED, Batch, Numbers, check_ids, gather_ranges, shuffle_in_epoch
from textmill.tokens.store import TokenStore

_SAMPLES_KEY = 10
"""Key of the shuffle of samples in each epoch."""
WIDTH_MULTIPLE = 64
"""Batches are as wide as their longest sample, rounded up to a multiple of this, so that they have few shapes."""


@dataclass(eq=False)
class LabelledLayout:
    """Samples padded to the longest of a batch; padding is document 0. Without a seed, in the order of the store."""

    store: TokenStore
    _: KW_ONLY
    length: int
    seed: int | None
    pad_id: int
    sep_id: int
    vocab: int | None = None

    def __post_init__(self) -> None:
        if self.store.labels is None:
            raise TextmillError(
                f"{self.store.prefix}: has no labels, which train.layout=labelled needs; set corpus.labels and run: "
                "textmill prepare WHERE --force, textmill tokenize WHERE --force"
            )
        if not len(self.store):
            raise TextmillError(f"{self.store.prefix}: has no examples to train on; add some")
        self.ids = np.asarray(self.store.ids)
        self.labels = np.asarray(self.store.labels)
        self.samples_per_epoch = len(self.store)
        self.store.advise(random=self.seed is not None)

    def build_samples(self, samples: Numbers) -> Batch:
        """The samples with these numbers."""
        chosen = shuffle_in_epoch(samples, self.samples_per_epoch, self.seed, _SAMPLES_KEY)
        edges = self.store.document_starts(np.stack([chosen, chosen + 1]))
        starts = edges[0]
        counts = edges[1] - edges[0]
        longest = int(counts.max(initial=1))
        if longest > self.length:
            raise TextmillError(
                f"{self.store.prefix}: has an example of {longest} tokens, train.length is {self.length}; "
                "make the tokens again with: textmill tokenize WHERE --force"
            )
        width = min(self.length, -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
        filled = np.arange(width) < counts[:, None]
        inputs = np.full(filled.shape, self.pad_id, np.int32)
        labels = np.full(filled.shape, IGNORED, np.int32)
        inputs[filled], labels[filled] = (gather_ranges(array, starts, counts) for array in (self.ids, self.labels))
        check_ids(inputs[filled], self.vocab, self.store.prefix)
        types = find_types(inputs, filled, self.sep_id)
        return Batch(inputs, labels, samples, filled.astype(np.int32), types)

    def find_documents(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """(row, document) of each sample."""
        chosen = shuffle_in_epoch(samples, self.samples_per_epoch, self.seed, _SAMPLES_KEY)
        return np.arange(len(samples)), chosen


def find_types(inputs: NDArray[np.int32], filled: NDArray[np.bool_], sep_id: int) -> NDArray[np.int32]:
    """The segment of each token: 1 after the first separator; no text has one inside, since it is a special token."""
    is_end = (inputs == sep_id) & filled
    types: NDArray[np.int32] = ((np.cumsum(is_end, axis=1) - is_end > 0) & filled).astype(np.int32)
    return types
