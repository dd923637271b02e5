"""The padded layout: one document a sample, cut or split where it is too long, padded where it is too short."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.batches.layout import Rows, Seen, check_ids, gathered
from textmill.tokens.batches.prefix_sums import Amounts, running_sums, sums_path
from textmill.tokens.batches.shuffle import placed
from textmill.tokens.store import TokenStore

_SAMPLES = 3


class Padded:
    """Samples that never hold two documents; without a seed in the store's own order."""

    def __init__(
        self, store: TokenStore, *, length: int, seed: int | None, pad: int, long: str = "split", close: int | None = None,
        vocab: int | None = None, folder: Path | None = None,
    ) -> None:  # fmt: skip
        self.store, self.length, self.seed, self.pad, self.close, self.vocab = store, length, seed, pad, close, vocab
        self.ids = np.asarray(store.ids)

        def amounts() -> Amounts:
            sizes = store.sizes()
            return lambda places: _samples_in(sizes[places].astype(np.int64), length, long)

        self.ends = running_sums(len(store), amounts, sums_path(folder, store, 0, "padded", length, long))
        store.expect(scattered=seed is not None)
        self.samples = int(self.ends[-1]) if len(self.ends) else 0
        if not self.samples:
            raise TextmillError(f"{store.prefix}: no document has two tokens; there is nothing to learn from; add text")

    def rows(self, samples: NDArray[np.int64]) -> Rows:
        """The samples of these numbers."""
        documents, parts = self._found(samples)
        edges = self.store.borders(np.stack([documents, documents + 1]))
        starts = edges[0] + parts * self.length
        counts = np.minimum(self.length + 1, edges[1] - starts)
        ids = gathered(self.ids, starts, counts)
        check_ids(ids, self.vocab, self.store.prefix)
        filled = np.arange(self.length + 1) < counts[:, None]
        rows = np.full(filled.shape, self.pad, np.int32)
        rows[filled] = ids
        if self.close is not None:
            rows[edges[1] - starts > self.length + 1, -1] = self.close
        return Rows(rows[:, :-1], np.where(filled[:, 1:], rows[:, 1:], np.int32(IGNORED)))

    def seen(self, samples: NDArray[np.int64]) -> Seen:
        """The document of each sample."""
        return Seen(np.arange(len(samples)), self._found(samples)[0])

    def _found(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The document of each sample, and which part of it."""
        places = placed(samples, self.samples, self.seed, _SAMPLES)
        documents = np.searchsorted(self.ends, places, side="right")
        before = np.where(documents > 0, np.asarray(self.ends[np.maximum(documents - 1, 0)]), 0)
        return documents, places - before


def _samples_in(sizes: NDArray[np.int64], length: int, long: str) -> NDArray[np.int64]:
    """Samples that documents give; a document of one token asks nothing."""
    many = -(-(sizes - 1) // length)
    return np.maximum(many if long == "split" else np.minimum(many, 1), 0)
