"""What a layout is: samples by their number, each a pure function of the store, the settings and that number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError


@dataclass(frozen=True)
class Rows:
    """Samples of one layout, as Batch has them."""

    inputs: NDArray[np.int32]
    labels: NDArray[np.int32]
    documents: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class Seen:
    """Which documents some samples hold, a pair of numbers for each."""

    rows: NDArray[np.int64]
    """Which of the samples asked for."""
    documents: NDArray[np.int64]
    """The document's number in its store, its first part's numbering."""


class Layout(Protocol):
    """One store, laid out."""

    samples: int
    """Samples in an epoch."""

    def rows(self, samples: NDArray[np.int64]) -> Rows:
        """The samples of these numbers; number `samples` is the second epoch's first."""
        ...

    def seen(self, samples: NDArray[np.int64]) -> Seen:
        """The documents that these samples hold."""
        ...


def gathered(ids: NDArray[Any], starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Stretches of ids, one after the other: no token is touched by Python."""
    before = np.cumsum(counts) - counts
    places = np.repeat(starts - before, counts)
    places += np.arange(len(places))
    found: NDArray[np.int32] = ids[places].astype(np.int32)
    return found


def check_ids(ids: NDArray[np.int32], vocab: int | None, where: object) -> None:
    """Refuse ids that the model has no vector for, before an engine meets them."""
    if vocab is not None and len(ids) and (int(ids.max()) >= vocab or int(ids.min()) < 0):
        raise TextmillError(
            f"{where}: holds the token id {int(ids.min()) if int(ids.min()) < 0 else int(ids.max())}, the tokenizer has {vocab:,} pieces; "
            f"name the tokenizer it was made with: tokenizer.use=FOLDER"
        )
