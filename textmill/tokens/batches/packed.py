"""The packed layout: documents are shuffled each epoch, joined into one stream and cut into windows of equal length.

The documents [1 2 3 0], [4 5 0] and [6 7 8 9 0] as windows of length 4, without shuffling (- is -100):

    inputs     [1 2 3 0]  [4 5 0 6]  [7 8 9 0]
    labels     [2 3 0 4]  [5 0 6 7]  [8 9 0 -]    shuffled, the last window goes on with the epoch's first tokens
    isolate_documents:
    labels     [2 3 0 -]  [5 0 - 7]  [8 9 0 -]
    documents  [1 1 1 1]  [1 1 1 2]  [1 1 1 1]    attention stays inside a document

A window is found by arithmetic: which documents it spans, from the prefix sums of their lengths (`_find_spans`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.ranges import expand_ranges
from textmill.tokens.batches.batch import (
    IGNORED,
    Batch,
    Numbers,
    check_ids,
    gather_ranges,
    number_spans,
    permute,
    prefix_sums,
)
from textmill.tokens.store import TokenStore

_DOCUMENTS_KEY = 1
_WINDOWS_KEY = 2
"""Each epoch shuffles the documents and then the windows; these keys make the two permutations independent."""


@dataclass(frozen=True)
class Spans:
    """The document ranges that a set of windows consists of, in the order of the windows."""

    rows: Numbers
    """Which of the requested windows each span belongs to: 0 for the first, 1 for the second ..."""
    documents: Numbers
    """The document that it comes from."""
    starts: Numbers
    """Its first token, as an index into the ids of the store."""
    counts: Numbers
    """How many tokens it has."""


@dataclass(eq=False)
class PackedLayout:
    """Windows of `length` inputs plus one token, the last label. Without a seed nothing is shuffled."""

    store: TokenStore
    _: KW_ONLY
    length: int
    seed: int | None
    isolate_documents: bool = False
    vocab: int | None = None
    folder: Path | None = None

    def __post_init__(self) -> None:
        if self.store.tokens < 2:
            raise TextmillError(f"{self.store.prefix}: has {self.store.tokens} tokens, too few to train on; add text")
        self.ids = np.asarray(self.store.ids)
        # The first tokens of the epoch fill up an incomplete last window, so that no token is left out.
        self.samples_per_epoch = -(-self.store.tokens // self.length)
        self.document_ends = lru_cache(maxsize=2)(self._document_ends)

    def build_samples(self, samples: Numbers) -> Batch:
        """The windows with these numbers."""
        inputs = np.empty((len(samples), self.length), np.int32)
        labels = np.empty_like(inputs)
        documents = np.empty_like(inputs) if self.isolate_documents else None
        for rows, spans in self._spans_by_epoch(samples):
            ids = gather_ranges(self.ids, spans.starts, spans.counts).reshape(len(rows), self.length + 1)
            check_ids(ids.ravel(), self.vocab, self.store.prefix)
            inputs[rows] = ids[:, :-1]
            labels[rows] = ids[:, 1:]
            if documents is not None:
                numbers = np.repeat(number_spans(spans.rows), spans.counts).reshape(ids.shape)
                documents[rows] = numbers[:, :-1]
                labels[rows] = np.where(numbers[:, 1:] == numbers[:, :-1], labels[rows], IGNORED)
        if self.seed is None:  # for evaluation: the tokens that fill up the last window must not have loss twice
            targets = (samples % self.samples_per_epoch * self.length)[:, None] + np.arange(1, self.length + 1)
            labels[targets >= self.store.tokens] = IGNORED
        return Batch(inputs, labels, samples, documents)

    def find_documents(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """(row, document) for every document in these windows."""
        found = [(rows[spans.rows], spans.documents) for rows, spans in self._spans_by_epoch(samples)]
        return np.concatenate([rows for rows, _ in found]), np.concatenate([documents for _, documents in found])

    def _spans_by_epoch(self, samples: Numbers) -> Iterator[tuple[Numbers, Spans]]:
        """For each epoch that the samples belong to: which of them do, and their spans."""
        epochs = samples // self.samples_per_epoch
        for epoch in np.unique(epochs).tolist():
            rows = np.flatnonzero(epochs == epoch)
            yield rows, self._find_spans(epoch, samples[rows] % self.samples_per_epoch)

    def _find_spans(self, epoch: int, positions: Numbers) -> Spans:
        """The document spans of the windows at these positions of the epoch.

        If documents end at 12, 20 and 30, the window of 15 tokens from 10 on has spans of 2, 8 and 5 tokens. A window
        that reaches the end of the epoch goes on at its start, as if the epoch were repeated: its documents are then
        numbered on, from the number of documents.
        """
        windows = positions
        if self.seed is not None:
            windows = permute(self.samples_per_epoch, positions, self.seed, _WINDOWS_KEY, epoch)
        ends = self.document_ends(epoch)

        def document_with(token: Numbers) -> Numbers:
            repeats, place = np.divmod(token, self.store.tokens)
            return repeats * len(ends) + np.searchsorted(ends, place, side="right")

        window_starts = windows * self.length
        window_stops = window_starts + self.length + 1
        first = document_with(window_starts)
        per_window = document_with(window_stops - 1) - first + 1
        rows = np.repeat(np.arange(len(windows)), per_window)
        repeats, places = np.divmod(expand_ranges(first, per_window), len(ends))
        begins = np.where(places > 0, np.asarray(ends[np.maximum(places - 1, 0)]), 0) + repeats * self.store.tokens
        stops = np.asarray(ends[places]) + repeats * self.store.tokens
        starts = np.maximum(window_starts[rows], begins)
        counts = np.minimum(window_stops[rows], stops) - starts
        documents = self._document_at(epoch, places)
        store_starts = self.store.document_starts(documents) + starts - begins
        has_tokens = counts > 0
        return Spans(rows[has_tokens], documents[has_tokens], store_starts[has_tokens], counts[has_tokens])

    def _document_at(self, epoch: int, places: Numbers) -> Numbers:
        """The documents at these places of the epoch's order."""
        return places if self.seed is None else permute(len(self.store), places, self.seed, _DOCUMENTS_KEY, epoch)

    def _document_ends(self, epoch: int) -> Numbers:
        """Where each document ends in the epoch's stream of shuffled documents."""
        self.store.advise(random=False)
        ends = prefix_sums(
            self.store,
            lambda lengths, places: lengths[self._document_at(epoch, places)],
            self.folder,
            epoch,
            "packed",
            "as it is" if self.seed is None else self.seed,
        )
        self.store.advise(random=self.seed is not None)
        return ends


def count_windows(store: TokenStore, *, length: int, stride: int, first_input: int | None = 0) -> int:
    """Count the windows that cover the store; without `first_input` its first token is not predicted."""
    predicted = store.tokens - (first_input is None)
    return 1 + max(0, -(-(predicted - length) // stride)) if predicted > 0 else 0


def window_batches(
    store: TokenStore,
    *,
    length: int,
    stride: int,
    batch: int,
    first_input: int | None,
    vocab: int | None = None,
    samples: NDArray[np.int64] | None = None,
) -> Iterator[Batch]:
    """Sliding windows over a complete store for its loss: every token is predicted exactly once.

    Windows of `length` tokens start every `stride` tokens; `samples` names some of them, default: all. Inputs are the
    labels shifted by one; `first_input` is the input at the first token, which has none before it. If it is None, the
    first token is only an input.

    The first window has loss on all its tokens. Later windows have loss only on tokens that no earlier window
    predicted. Tokens after the first window have at least `length - stride` tokens of context. The ids 1 to 6 with
    length 4, stride 2 and first input 0 (- is -100):

        inputs  [0 1 2 3]  [2 3 4 5]
        labels  [1 2 3 4]  [- - 5 6]
    """
    if samples is None:
        samples = np.arange(count_windows(store, length=length, stride=stride, first_input=first_input), dtype=np.int64)
    first_label = 0
    pad = first_input or 0
    if first_input is None and store.tokens:
        first_label = 1
        pad = int(store.ids[0])
    for begin in range(0, len(samples), batch):
        store.check_mapped()
        numbers = samples[begin : begin + batch]
        inputs = np.full((len(numbers), length), pad, np.int32)
        labels = np.full((len(numbers), length), IGNORED, np.int32)
        for row, sample in enumerate(numbers.tolist()):
            start = first_label + sample * stride
            ids = store.ids[start : start + length]
            labels[row, : len(ids)] = ids
            inputs[row, 1 : len(ids)] = ids[:-1]
            if start:
                inputs[row, 0] = store.ids[start - 1]
            if sample:
                labels[row, : max(0, length - stride)] = IGNORED
        check_ids(labels[labels != IGNORED], vocab, store.prefix)
        yield Batch(inputs, labels, numbers)
