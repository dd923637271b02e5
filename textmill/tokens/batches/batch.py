"""Batch: the numpy arrays that every layout builds and every engine consumes.

How some layouts turn the documents [1 2 3 0] and [4 5 0] into samples of 4 tokens, or 8 (- is -100, p is padding):

    packed (packed.py)   inputs [1 2 3 0] [4 5 0 ...]        labels [2 3 0 4] [5 0 ...]
    padded (padded.py)   inputs [1 2 3 0] [4 5 0 p]          labels [2 3 0 -] [5 0 - -]
    masked (masked.py)   inputs [CLS 1 MASK 3 SEP p p p]     labels [- - 2 - - - - -]

The chat, features and labelled layouts have files of their own too; from_config.py chooses one by `train.layout`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from textmill.storage import faults

IGNORED = -100
"""The label of a position without loss (PyTorch's `ignore_index`)."""
OPTIONAL_FIELDS = ("documents", "types", "pair_labels", "weights")
"""Fields of a Batch that only some layouts fill; a model family declares those that it uses as BATCH_FIELDS."""


@dataclass(frozen=True)
class Batch:
    """Samples of one step."""

    inputs: NDArray[np.int32]
    """[samples, length]: token ids."""
    labels: NDArray[np.int32]
    """[samples, length]: the token to predict at each position; -100: no loss.

    next_token: already shifted, so labels[t] is the token after inputs[t]. masked: at a masked position, the token that
    was there."""
    samples: NDArray[np.int64]
    """[samples]: the number of each sample, counted from the start of the run; used for dropout and lineage."""
    documents: NDArray[np.int32] | None = None
    """[samples, length]: which document, or which of several packed sentence pairs, a position belongs to: 1, 2 ...;
    0 is padding."""
    types: NDArray[np.int32] | None = None
    """[samples, length]: the segment of a sentence pair, 0 or 1."""
    pair_labels: NDArray[np.int32] | None = None
    """[samples, length]: at the first position of each packed pair its class (next sentence, order); -100 elsewhere."""
    weights: NDArray[np.float32] | None = None
    """[samples] or [samples, length]."""
    teacher_ids: NDArray[np.int32] | None = None
    """[samples, length, k]: distillation's most likely tokens, from a cache."""
    teacher_logs: NDArray[np.float32] | None = None
    """[samples, length, k + 1]: their log-probabilities, and that of all other tokens together."""
    multi_token_weight: float | None = None
    """With `train.multi_token`: the weight in this step of predicting also the token after each label."""


def inject_spike(batch: Batch, step: int) -> Batch:
    """The batch of a step, with wrong labels if that fault is due."""
    return corrupt_labels(batch) if faults.is_due("spike", step) else batch


def corrupt_labels(batch: Batch) -> Batch:
    """Replace every loss label by one token id that is wrong everywhere."""
    others = np.setdiff1d(np.arange(batch.labels.max() + 1), batch.labels)
    return replace(
        batch, labels=np.where(batch.labels == IGNORED, IGNORED, others[0] if len(others) else 0).astype(np.int32)
    )
