"""The packed layout: documents shuffled each epoch, joined into one stream, cut into windows; a window's place is arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.batches.layout import Rows, Seen, check_ids, gathered
from textmill.tokens.batches.prefix_sums import Amounts, running_sums, sums_path
from textmill.tokens.batches.shuffle import shuffled
from textmill.tokens.store import TokenStore

_DOCUMENTS, _WINDOWS = 1, 2


@dataclass(frozen=True)
class Pieces:
    """Stretches of documents that fill windows, in the windows' order."""

    rows: NDArray[np.int64]
    """The window that a piece stands in."""
    documents: NDArray[np.int64]
    """The document it is of."""
    starts: NDArray[np.int64]
    """Where it begins in the store's ids."""
    counts: NDArray[np.int64]
    """Its tokens."""


class Packed:
    """Windows of `length` tokens, each with the token after it; without a seed in the store's own order."""

    def __init__(
        self, store: TokenStore, *, length: int, seed: int | None, apart: bool = False, tail: str = "keep",
        vocab: int | None = None, folder: Path | None = None,
    ) -> None:  # fmt: skip
        if store.tokens < 2:
            raise TextmillError(f"{store.prefix}: {store.tokens} tokens; there is nothing to learn from; add text")
        self.store, self.length, self.seed, self.apart, self.vocab, self.folder = (
            store,
            length,
            seed,
            apart,
            vocab,
            folder,
        )
        self.ids = np.asarray(store.ids)
        # A tail that is kept runs on into the epoch's beginning, so that no token is left out.
        self.samples = -(-store.tokens // length) if tail == "keep" else (store.tokens - 1) // length
        if not self.samples:
            raise TextmillError(
                f"{store.prefix}: {store.tokens} tokens fill no window of {length}; set train.packed.last_window=keep or add text"
            )
        self.ends = lru_cache(maxsize=2)(self._ends)

    def rows(self, samples: NDArray[np.int64]) -> Rows:
        """The windows of these numbers."""
        inputs = np.empty((len(samples), self.length), np.int32)
        labels = np.empty_like(inputs)
        documents = np.empty_like(inputs) if self.apart else None
        for epoch, mine in _by_epoch(samples, self.samples):
            pieces = self._pieces(epoch, samples[mine] % self.samples)
            ids = gathered(self.ids, pieces.starts, pieces.counts).reshape(len(mine), self.length + 1)
            check_ids(ids.ravel(), self.vocab, self.store.prefix)
            inputs[mine], labels[mine] = ids[:, :-1], ids[:, 1:]
            if documents is not None:
                numbers = np.repeat(numbers_of(pieces.rows), pieces.counts).reshape(ids.shape)
                documents[mine] = numbers[:, :-1]
                labels[mine] = np.where(numbers[:, 1:] == numbers[:, :-1], labels[mine], IGNORED)
        if self.seed is None:  # in its own order a token is asked once: what a tail runs on into is not asked again
            asked = (samples % self.samples * self.length)[:, None] + np.arange(1, self.length + 1)
            labels[asked >= self.store.tokens] = IGNORED
        return Rows(inputs, labels, documents)

    def seen(self, samples: NDArray[np.int64]) -> Seen:
        """The documents of these windows."""
        found = [
            (mine, self._pieces(epoch, samples[mine] % self.samples))
            for epoch, mine in _by_epoch(samples, self.samples)
        ]
        return Seen(
            np.concatenate([mine[pieces.rows] for mine, pieces in found]),
            np.concatenate([one.documents for _, one in found]),
        )

    def _order(self, epoch: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return places if self.seed is None else shuffled(len(self.store), places, self.seed, _DOCUMENTS, epoch)

    def _ends(self, epoch: int) -> NDArray[np.int64]:
        """Where each document of the epoch's order ends in its stream."""

        def amounts() -> Amounts:
            sizes = self.store.sizes()
            return lambda places: sizes[self._order(epoch, places)].astype(np.int64)

        path = sums_path(self.folder, self.store, epoch, "packed", "as it is" if self.seed is None else self.seed)
        self.store.expect(scattered=False)
        ends = running_sums(len(self.store), amounts, path)
        self.store.expect(scattered=self.seed is not None)
        return ends

    def _pieces(self, epoch: int, places: NDArray[np.int64]) -> Pieces:
        """The documents' stretches that fill windows, found for all windows at once."""
        windows = places if self.seed is None else shuffled(self.samples, places, self.seed, _WINDOWS, epoch)
        ends, tokens = self.ends(epoch), self.store.tokens
        rows, begins, left = np.arange(len(places)), windows * self.length, np.full(len(places), self.length + 1)
        parts: list[Pieces] = []
        while len(rows):  # once, and again for windows that run on into the epoch's beginning
            counts = np.minimum(left, tokens - begins)
            parts.append(self._stretches(epoch, ends, rows, begins, counts))
            more = left > counts
            rows, left = rows[more], (left - counts)[more]
            begins = np.zeros_like(left)
        if len(parts) == 1:
            return parts[0]
        joined = [
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("rows", "documents", "starts", "counts")
        ]
        order = np.argsort(joined[0], kind="stable")
        return Pieces(*(array[order] for array in joined))

    def _stretches(
        self,
        epoch: int,
        ends: NDArray[np.int64],
        rows: NDArray[np.int64],
        begins: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> Pieces:
        """Stretches of the stream that do not run past its end, cut at the documents' borders."""
        first = np.searchsorted(ends, begins, side="right")
        last = np.searchsorted(ends, begins + counts - 1, side="right")
        many = last - first + 1
        which = np.repeat(np.arange(len(rows)), many)
        places = np.arange(len(which)) + np.repeat(first - (np.cumsum(many) - many), many)
        stops = np.asarray(ends[places])
        origins = np.where(places > 0, np.asarray(ends[np.maximum(places - 1, 0)]), 0)
        starts = np.maximum(begins[which], origins)
        sizes = np.minimum((begins + counts)[which], stops) - starts
        documents = self._order(epoch, places)
        filled = sizes > 0
        inside = self.store.borders(documents) + starts - origins
        return Pieces(rows[which][filled], documents[filled], inside[filled], sizes[filled])


def _by_epoch(samples: NDArray[np.int64], count: int) -> list[tuple[int, NDArray[np.int64]]]:
    epochs = samples // count
    return [(int(epoch), np.flatnonzero(epochs == epoch)) for epoch in np.unique(epochs)]


def numbers_of(rows: NDArray[np.int64]) -> NDArray[np.int32]:
    """1, 2, 3 ... for the pieces of each row."""
    first = np.searchsorted(rows, rows, side="left")
    return (np.arange(len(rows)) - first + 1).astype(np.int32)
