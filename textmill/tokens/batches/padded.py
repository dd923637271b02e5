"""The padded layout: one document per sample, split or truncated if too long, padded if too short.

The documents [1 2 3 0], [4 5 0] and [6 7 8 9 0] as samples of length 4 (- is -100, p is the padding token):

    inputs  [1 2 3 0]  [4 5 0 p]  [6 7 8 9]
    labels  [2 3 0 -]  [5 0 - -]  [7 8 9 0]
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np

from textmill.errors import TextmillError
from textmill.tokens.batches.batch import (
    IGNORED,
    Batch,
    Numbers,
    check_ids,
    gather_ranges,
    prefix_sums,
    shuffle_in_epoch,
)
from textmill.tokens.store import TokenStore

_SAMPLES_KEY = 3
"""Key of the shuffle of samples."""


@dataclass(eq=False)
class PaddedLayout:
    """Samples that never contain two documents. Without a seed, in the order of the store.

    With `long_documents` = end, `eos_id` replaces the last token of a sample whose document was truncated.
    """

    store: TokenStore
    _: KW_ONLY
    length: int
    seed: int | None
    pad_id: int
    long_documents: str = "split"
    eos_id: int = 0
    vocab: int | None = None
    folder: Path | None = None

    def __post_init__(self) -> None:
        self.ids = np.asarray(self.store.ids)

        self.ends = prefix_sums(
            self.store,
            lambda lengths, documents: _count_samples(lengths[documents], self.length, self.long_documents),
            self.folder,
            0,
            "padded",
            self.length,
            self.long_documents,
        )
        self.store.advise(random=self.seed is not None)
        self.samples_per_epoch = int(self.ends[-1]) if len(self.ends) else 0
        if not self.samples_per_epoch:
            raise TextmillError(
                f"{self.store.prefix}: no document has two tokens, so there is nothing to train on; add text"
            )

    def build_samples(self, samples: Numbers) -> Batch:
        """The samples with these numbers."""
        documents, parts = self._find(samples)
        edges = self.store.document_starts(np.stack([documents, documents + 1]))
        starts = edges[0] + parts * self.length
        counts = np.minimum(self.length + 1, edges[1] - starts)
        ids = gather_ranges(self.ids, starts, counts)
        check_ids(ids, self.vocab, self.store.prefix)
        filled = np.arange(self.length + 1) < counts[:, None]
        rows = np.full(filled.shape, self.pad_id, np.int32)
        rows[filled] = ids
        if self.long_documents == "end":
            rows[edges[1] - starts > self.length + 1, -1] = self.eos_id
        return Batch(rows[:, :-1], np.where(filled[:, 1:], rows[:, 1:], np.int32(IGNORED)), samples)

    def find_documents(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """(row, document) of each sample."""
        return np.arange(len(samples)), self._find(samples)[0]

    def _find(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """The document of each sample, and which part of the document it is."""
        positions = shuffle_in_epoch(samples, self.samples_per_epoch, self.seed, _SAMPLES_KEY)
        documents = np.searchsorted(self.ends, positions, side="right")
        before = np.where(documents > 0, np.asarray(self.ends[np.maximum(documents - 1, 0)]), 0)
        return documents, positions - before


def _count_samples(lengths: Numbers, length: int, long_documents: str) -> Numbers:
    """How many samples each document gives; a document of one token has no loss token and gives none."""
    parts = -(-(lengths - 1) // length)
    return np.maximum(parts if long_documents == "split" else np.minimum(parts, 1), 0)
