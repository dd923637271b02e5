"""Where a batch has labels, without a framework: the few positions that heads compute, and how many pairs there are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.engines import Sums
from textmill.processes.ranks import Ranks
from textmill.tokens.batches.batch import IGNORED, Batch

PAIR, PAIR_LOSS = "pair", "pair_loss"
"""The name of the pair head in evaluations, and of its loss in the log of training."""

SIZES_PER_SAMPLE = 32
"""A sample's labelled positions are padded to one of this many sizes, so that few shapes are compiled."""


def padded_count(labels_NT: NDArray[np.int32]) -> int:
    """How many positions of each sample to compute: a multiple that holds the most labels of any sample."""
    length: int = labels_NT.shape[1]
    most = int((labels_NT != IGNORED).sum(1).max(initial=1))
    multiple = max(1, length // SIZES_PER_SAMPLE)
    return min(length, max(1, -(-most // multiple)) * multiple)


def labelled_positions(labels_NT: NDArray[np.int32], count: int | None = None) -> NDArray[np.int64]:
    """The positions [N, count] of each sample's labels, in order; default: `padded_count` of them.

    A sample with fewer labels is filled with positions that have none.
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
    found: dict[str, NDArray[Any]] = {}
    chosen = {"": (batch.labels, few), "pair_": (batch.pair_labels, True)}
    for prefix, (labels, gathers) in chosen.items() if pairs else [("", chosen[""])]:
        labels = np.full_like(batch.labels, IGNORED) if labels is None else labels
        if gathers:
            count = max(ranks.all_gather(padded_count(labels)))
            found[f"{prefix}positions"] = labelled_positions(labels, count).astype(np.int32)
            labels = np.take_along_axis(labels, found[f"{prefix}positions"], 1)
        found[f"{prefix}labels"] = labels
    return found


def named_sums(totals: list[float], tokens: int, pairs: list[int]) -> Sums:
    """The result of an evaluation from totals over all ranks; pairs are left out if the batch has no labels of them."""
    others = {PAIR: Sums(totals[2], pairs[0], round(totals[3]))} if pairs else {}
    return Sums(totals[0], tokens, round(totals[1]), others)
