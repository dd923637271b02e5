"""The chat layout: whole conversations side by side in a sample, each by itself; loss where the assistant speaks, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.batches.layout import Rows, Seen, check_ids, gathered
from textmill.tokens.batches.packed import numbers_of
from textmill.tokens.batches.prefix_sums import Amounts, running_sums, sums_path
from textmill.tokens.batches.shuffle import placed, shuffled
from textmill.tokens.store import TokenStore

_CONVERSATIONS, _SAMPLES = 5, 6


class Chat:
    """Samples of conversations that are never parted; without a seed in the store's own order.

    A conversation of n tokens takes n - 1 places, since its last token is only predicted. One that is too long
    loses its beginning (`cut=start`), so that the last answer and its stop token stay, or its end.
    Which conversations share a sample is settled once; an epoch puts the samples in another order.
    """

    def __init__(
        self, store: TokenStore, *, length: int, seed: int | None, pad: int, cut: str = "start", pack: bool = True,
        vocab: int | None = None, folder: Path | None = None,
    ) -> None:  # fmt: skip
        if store.asked is None:
            raise TextmillError(
                f"{store.prefix}: holds no conversations, and train.layout=chat trains on such; make them with corpus.chat and "
                f"tokenizer.chat, or set train.layout=packed"
            )
        self.store, self.length, self.seed, self.pad, self.cut, self.pack, self.vocab = (
            store,
            length,
            seed,
            pad,
            cut,
            pack,
            vocab,
        )
        self.ids, self.asked = np.asarray(store.ids), np.asarray(store.asked)

        def amounts() -> Amounts:
            sizes = store.sizes()
            return lambda places: np.clip(sizes[self._order(places)].astype(np.int64) - 1, 0, length)

        path = sums_path(folder, store, 0, "chat", length, "as it is" if seed is None else seed)
        self.ends = running_sums(len(store), amounts, path)
        self.firsts = _first_places(self.ends, length) if pack else np.arange(len(store))
        store.expect(scattered=seed is not None)
        self.samples = len(self.firsts)
        if not self.samples:
            raise TextmillError(f"{store.prefix}: there are no conversations; there is nothing to learn from; add some")

    def rows(self, samples: NDArray[np.int64]) -> Rows:
        """The samples of these numbers."""
        which, conversations = self._found(samples)
        edges = self.store.borders(np.stack([conversations, conversations + 1]))
        counts = np.clip(edges[1] - edges[0] - 1, 0, self.length)
        starts = edges[1] - counts - 1 if self.cut == "start" else edges[0]
        used = np.bincount(which, counts, len(samples)).astype(np.int64)
        filled = np.arange(self.length) < used[:, None]
        inputs, labels = np.full(filled.shape, self.pad, np.int32), np.full(filled.shape, IGNORED, np.int32)
        inputs[filled], answers = gathered(self.ids, starts, counts), gathered(self.ids, starts + 1, counts)
        check_ids(inputs[filled], self.vocab, self.store.prefix)
        check_ids(answers, self.vocab, self.store.prefix)
        labels[filled] = np.where(gathered(self.asked, starts + 1, counts) > 0, answers, np.int32(IGNORED))
        if not self.pack:
            return Rows(inputs, labels)
        documents = np.zeros_like(inputs)
        documents[filled] = np.repeat(numbers_of(which), counts)
        return Rows(inputs, labels, documents)

    def seen(self, samples: NDArray[np.int64]) -> Seen:
        """The conversations of these samples."""
        return Seen(*self._found(samples))

    def _order(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return places if self.seed is None else shuffled(len(self.store), places, self.seed, _CONVERSATIONS)

    def _found(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which sample each conversation stands in, and which conversation it is."""
        windows = placed(samples, self.samples, self.seed, _SAMPLES)
        first = self.firsts[windows]
        many = np.append(self.firsts[1:], len(self.store))[windows] - first
        which = np.repeat(np.arange(len(samples)), many)
        places = np.arange(len(which)) + np.repeat(first - (np.cumsum(many) - many), many)
        return which, self._order(places)


def _first_places(ends: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Where each sample begins, when every one takes conversations in order until the next does not fit."""
    before = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else np.zeros(0, np.int64)
    following = np.searchsorted(ends, before + length, side="right")
    firsts, place = [], 0
    while place < len(ends):
        firsts.append(place)
        place = following.item(place)
    return np.array(firsts, np.int64)
