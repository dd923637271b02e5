"""The interface of a batch layout: a sample is a pure function of the store, the settings and its number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.ranges import expand_ranges

OBJECTIVES = {"masked": ("masked",), "labelled": ("labels",)}
"""What a net can learn from the labels of a layout, by its name; from the others: next_token."""


def objectives_of(layout: str) -> tuple[str, ...]:
    """What a net can learn from the labels of a layout: next_token, masked or labels."""
    return OBJECTIVES.get(layout, ("next_token",))


@dataclass(frozen=True)
class SampleArrays:
    """Samples of one layout, with the arrays of `Batch`."""

    inputs: NDArray[np.int32]
    labels: NDArray[np.int32]
    documents: NDArray[np.int32] | None = None
    types: NDArray[np.int32] | None = None
    pair_labels: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class SampleDocuments:
    """Which documents are in which samples: one (row, document) pair for each."""

    rows: NDArray[np.int64]
    """The position of the sample among the requested ones."""
    documents: NDArray[np.int64]
    """The number of the document in its store."""


class Layout(Protocol):
    """Turns the documents of one store into samples."""

    samples_per_epoch: int

    def build_samples(self, samples: NDArray[np.int64]) -> SampleArrays:
        """The samples with these numbers; number `samples_per_epoch` is the first of the second epoch."""
        ...

    def find_documents(self, samples: NDArray[np.int64]) -> SampleDocuments:
        """The documents in these samples."""
        ...


def gather_ranges(ids: NDArray[Any], starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Concatenate the ranges ids[start : start + count]."""
    gathered: NDArray[np.int32] = ids[expand_ranges(starts, counts)].astype(np.int32)
    return gathered


def check_ids(ids: NDArray[np.int32], vocab: int | None, where: object) -> None:
    """Raise an error if an id is outside the vocabulary, before it reaches an engine."""
    if vocab is not None and len(ids) and (int(ids.max()) >= vocab or int(ids.min()) < 0):
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise TextmillError(
            f"{where}: contains token id {wrong}, but the tokenizer's vocabulary has {vocab:,} tokens; "
            f"set the tokenizer that made these ids: tokenizer.use=FOLDER"
        )
