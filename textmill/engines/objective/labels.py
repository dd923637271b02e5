"""Where a batch has labels, without a framework: the few positions that heads compute, and how many pairs there are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from textmill.tokens.batches.batch import IGNORED, Batch

SIZES_PER_SAMPLE = 32
"""A sample's labelled positions are padded to one of this many sizes, so that few shapes are compiled."""


def labelled_positions(labels_NT: NDArray[np.int32]) -> NDArray[np.int64]:
    """The positions [N, K] of each sample's labels, in order; K is a multiple that holds the most of any sample.

    A sample with fewer labels is filled with positions that have none.
    """
    labelled = labels_NT != IGNORED
    length = labels_NT.shape[1]
    multiple = max(1, length // SIZES_PER_SAMPLE)
    most = int(labelled.sum(1).max(initial=1))
    count = min(length, max(1, -(-most // multiple)) * multiple)
    return np.argsort(~labelled, axis=1, kind="stable")[:, :count]


def count_pairs(batch: Batch) -> list[int]:
    """How many pairs have a label; empty if the batch has no labels of pairs."""
    return [] if batch.pair_labels is None else [int((batch.pair_labels != IGNORED).sum())]
