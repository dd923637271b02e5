"""Where a batch has labels, without a framework: the few positions that heads compute, and how many pairs there are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.engines import Sums
from textmill.processes.ranks import Ranks
from textmill.tokens.batches.batch import IGNORED, Batch

PAIR = "pair"
PAIR_LOSS = "pair_loss"
"""The name of the pair head in evaluations, and of its loss in the log of training."""

SIZES_PER_SAMPLE = 32
"""A sample's labelled positions are padded to one of this many sizes, so that few shapes are compiled."""


def padded_count(labels_NT: NDArray[np.int32]) -> int:
    """How many positions of each sample to compute: the most labels of any sample, rounded up to a multiple.

    In samples of 512 tokens, of which one has 70 labels, it is 80: a multiple of 512 / 32 = 16.
    """
    length: int = labels_NT.shape[1]
    most_labels = int((labels_NT != IGNORED).sum(1).max(initial=1))
    multiple = max(1, length // SIZES_PER_SAMPLE)
    return min(length, max(1, -(-most_labels // multiple)) * multiple)


def labelled_positions(labels_NT: NDArray[np.int32], count: int | None = None) -> NDArray[np.int64]:
    """The positions [N, count] of each sample's labels, in order; default: `padded_count` of them.

    A sample with fewer labels is filled with positions that have none: with labels at 1 and 3 of 4 tokens and a count
    of 3, it is [1, 3, 0].
    """
    order_NT = np.argsort(labels_NT == IGNORED, axis=1, kind="stable")
    return order_NT[:, : padded_count(labels_NT) if count is None else count]


def count_pairs(batch: Batch) -> list[int]:
    """How many pairs have a label; empty if the batch has no labels of pairs."""
    return [] if batch.pair_labels is None else [int((batch.pair_labels != IGNORED).sum())]


def label_arrays(batch: Batch, few: bool, pairs: bool, ranks: Ranks) -> dict[str, NDArray[Any]]:
    """Labels and their positions for a program with fixed shapes, equal on all ranks.

    With `few`, only labelled tokens and their positions; with `pairs`, those of a pair head too.
    """
    arrays: dict[str, NDArray[Any]] = {"labels": batch.labels}
    if few:
        arrays["labels"], arrays["positions"] = _take_labelled(batch.labels, ranks)
    if pairs:
        pair_labels = np.full_like(batch.labels, IGNORED) if batch.pair_labels is None else batch.pair_labels
        arrays["pair_labels"], arrays["pair_positions"] = _take_labelled(pair_labels, ranks)
    return arrays


def _take_labelled(labels_NT: NDArray[np.int32], ranks: Ranks) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The labels and their positions in each sample; as many of each sample on every rank."""
    count = max(ranks.all_gather(padded_count(labels_NT)))
    positions = labelled_positions(labels_NT, count).astype(np.int32)
    return np.take_along_axis(labels_NT, positions, 1), positions


def named_sums(totals: list[float], tokens: int, pairs: list[int]) -> Sums:
    """The result of an evaluation from totals over all ranks; pairs are left out if the batch has no labels of them."""
    others = {PAIR: Sums(totals[2], pairs[0], round(totals[3]))} if pairs else {}
    return Sums(totals[0], tokens, round(totals[1]), others)
