"""The chat layout: full conversations packed into samples, isolated from each other, with loss on the answers only.

The conversations [1 2 3 0] and [4 5 0], whose answers are [3 0] and [5 0], in a sample of length 6 (- is -100, p is the
padding token):

    inputs     [1 2 3 4 5 p]
    labels     [- 3 0 5 0 -]
    documents  [1 1 1 2 2 0]
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.ranges import expand_ranges
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.batches.layout import SampleArrays, SampleDocuments, check_ids, gather_ranges
from textmill.tokens.batches.packed import number_spans
from textmill.tokens.batches.prefix_sums import CountAt, prefix_sums, prefix_sums_path
from textmill.tokens.batches.shuffle import permute, shuffle_in_epoch
from textmill.tokens.store import TokenStore

_CONVERSATIONS_KEY = 5
_SAMPLES_KEY = 6
"""Keys of the two shuffles: of conversations, and of samples in each epoch."""


class ChatLayout:
    """Samples of one or more full conversations. Without a seed, conversations keep the order of the store.

    A conversation of n tokens takes n - 1 positions, because its last token is only a label. A longer one is truncated
    at its start, which keeps the last answer and its stop token, or at its end (`truncate`).
    Which conversations share a sample is fixed for the run; each epoch shuffles the samples.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        length: int,
        seed: int | None,
        pad: int,
        truncate: str = "start",
        pack: bool = True,
        vocab: int | None = None,
        folder: Path | None = None,
    ) -> None:
        if store.loss_mask is None:
            raise TextmillError(
                f"{store.prefix}: has no conversations, which train.layout=chat needs; make them with corpus.chat and "
                f"tokenizer.chat, or set train.layout=packed"
            )
        self.store = store
        self.length = length
        self.seed = seed
        self.pad = pad
        self.truncate = truncate
        self.pack = pack
        self.vocab = vocab
        self.ids, self.loss_mask = np.asarray(store.ids), np.asarray(store.loss_mask)

        def build_counts() -> CountAt:
            lengths = store.document_lengths()
            return lambda positions: np.clip(lengths[self._document_at(positions)].astype(np.int64) - 1, 0, length)

        path = prefix_sums_path(folder, store, 0, "chat", length, "as it is" if seed is None else seed)
        self.ends = prefix_sums(len(store), build_counts, path)
        self.firsts = _first_conversations(self.ends, length) if pack else np.arange(len(store))
        store.advise(random=seed is not None)
        self.samples_per_epoch = len(self.firsts)
        if not self.samples_per_epoch:
            raise TextmillError(f"{store.prefix}: has no conversations to train on; add some")

    def build_samples(self, samples: NDArray[np.int64]) -> SampleArrays:
        """The samples with these numbers."""
        rows, conversations = self._find(samples)
        edges = self.store.document_starts(np.stack([conversations, conversations + 1]))
        counts = np.clip(edges[1] - edges[0] - 1, 0, self.length)
        starts = edges[1] - counts - 1 if self.truncate == "start" else edges[0]
        used = np.bincount(rows, counts, len(samples)).astype(np.int64)
        filled = np.arange(self.length) < used[:, None]
        inputs = np.full(filled.shape, self.pad, np.int32)
        labels = np.full(filled.shape, IGNORED, np.int32)
        inputs[filled], targets = gather_ranges(self.ids, starts, counts), gather_ranges(self.ids, starts + 1, counts)
        check_ids(inputs[filled], self.vocab, self.store.prefix)
        check_ids(targets, self.vocab, self.store.prefix)
        labels[filled] = np.where(gather_ranges(self.loss_mask, starts + 1, counts) > 0, targets, np.int32(IGNORED))
        if not self.pack:
            return SampleArrays(inputs, labels)
        documents = np.zeros_like(inputs)
        documents[filled] = np.repeat(number_spans(rows), counts)
        return SampleArrays(inputs, labels, documents)

    def find_documents(self, samples: NDArray[np.int64]) -> SampleDocuments:
        """The conversations in these samples."""
        return SampleDocuments(*self._find(samples))

    def _document_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions if self.seed is None else permute(len(self.store), positions, self.seed, _CONVERSATIONS_KEY)

    def _find(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(row, conversation) for every conversation in these samples."""
        bins = shuffle_in_epoch(samples, self.samples_per_epoch, self.seed, _SAMPLES_KEY)
        first = self.firsts[bins]
        per_sample = np.append(self.firsts[1:], len(self.store))[bins] - first
        rows = np.repeat(np.arange(len(samples)), per_sample)
        positions = expand_ranges(first, per_sample)
        return rows, self._document_at(positions)


def _first_conversations(ends: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """The first conversation of each sample (next-fit packing: in order, until the next one does not fit)."""
    before = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) if len(ends) else np.zeros(0, np.int64)
    following = np.searchsorted(ends, before + length, side="right")
    firsts = []
    position = 0
    while position < len(ends):
        firsts.append(position)
        position = following.item(position)
    return np.array(firsts, np.int64)
