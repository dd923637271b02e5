"""Batch: what every layout makes and every engine takes, in numpy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

IGNORED = -100
"""A label that asks nothing."""


@dataclass(frozen=True)
class Batch:
    """The samples asked for, of one step."""

    inputs: NDArray[np.int32]
    """[samples, length]"""
    labels: NDArray[np.int32]
    """[samples, length], already shifted: labels[t] is what inputs[..t] must predict; -100 asks nothing."""
    samples: NDArray[np.int64]
    """[samples]: each one's place in the global order; feeds dropout and lineage."""
    documents: NDArray[np.int32] | None = None
    """[samples, length]: which document a position belongs to, 0 = padding."""
    types: NDArray[np.int32] | None = None
    """[samples, length]: BERT's segment A or B."""
    pair_labels: NDArray[np.int32] | None = None
    """[samples]: next sentence, order or class."""
    weights: NDArray[np.float32] | None = None
    """[samples] or [samples, length]."""


def garbled(batch: Batch) -> Batch:
    """The batch with labels that are garbage: wherever one is asked, the same token, which it does not ask for elsewhere."""
    others = np.setdiff1d(np.arange(batch.labels.max() + 1), batch.labels)
    return replace(
        batch, labels=np.where(batch.labels == IGNORED, IGNORED, others[0] if len(others) else 0).astype(np.int32)
    )
