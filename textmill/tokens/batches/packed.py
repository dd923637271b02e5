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
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.ranges import expand_ranges
from textmill.tokens.batches.batch import (
    IGNORED,
    Batch,
    CountAt,
    SampleArrays,
    SampleDocuments,
    check_ids,
    gather_ranges,
    permute,
    prefix_sums,
    prefix_sums_path,
)
from textmill.tokens.store import TokenStore

_DOCUMENTS_KEY = 1
_WINDOWS_KEY = 2
"""Each epoch shuffles the documents and then the windows; these keys make the two permutations independent."""


@dataclass(frozen=True)
class Spans:
    """The document ranges that a set of windows consists of, in the order of the windows."""

    rows: NDArray[np.int64]
    """Which of the requested windows each span belongs to: 0 for the first, 1 for the second ..."""
    documents: NDArray[np.int64]
    """The document that it comes from."""
    starts: NDArray[np.int64]
    """Its first token, as an index into the ids of the store."""
    counts: NDArray[np.int64]
    """How many tokens it has."""


class PackedLayout:
    """Windows of `length` inputs plus one token, the last label. Without a seed nothing is shuffled."""

    def __init__(
        self,
        store: TokenStore,
        *,
        length: int,
        seed: int | None,
        isolate_documents: bool = False,
        last_window: str = "keep",
        vocab: int | None = None,
        folder: Path | None = None,
    ) -> None:
        if store.tokens < 2:
            raise TextmillError(f"{store.prefix}: has {store.tokens} tokens, too few to train on; add text")
        self.store = store
        self.length = length
        self.seed = seed
        self.isolate_documents = isolate_documents
        self.vocab = vocab
        self.folder = folder
        self.ids = np.asarray(store.ids)
        # "keep" fills an incomplete last window with the first tokens of the epoch, so that no token is left out.
        self.samples_per_epoch = -(-store.tokens // length) if last_window == "keep" else (store.tokens - 1) // length
        if not self.samples_per_epoch:
            raise TextmillError(
                f"{store.prefix}: {store.tokens} tokens are less than one window of {length}; "
                f"set train.packed.last_window=keep or add text"
            )
        self.document_ends = lru_cache(maxsize=2)(self._document_ends)

    def build_samples(self, samples: NDArray[np.int64]) -> SampleArrays:
        """Build the windows with these numbers."""
        inputs = np.empty((len(samples), self.length), np.int32)
        labels = np.empty_like(inputs)
        documents = np.empty_like(inputs) if self.isolate_documents else None
        for epoch, rows in _rows_by_epoch(samples, self.samples_per_epoch):
            spans = self._find_spans(epoch, samples[rows] % self.samples_per_epoch)
            ids = gather_ranges(self.ids, spans.starts, spans.counts).reshape(len(rows), self.length + 1)
            check_ids(ids.ravel(), self.vocab, self.store.prefix)
            inputs[rows], labels[rows] = ids[:, :-1], ids[:, 1:]
            if documents is not None:
                numbers = np.repeat(number_spans(spans.rows), spans.counts).reshape(ids.shape)
                documents[rows] = numbers[:, :-1]
                labels[rows] = np.where(numbers[:, 1:] == numbers[:, :-1], labels[rows], IGNORED)
        if self.seed is None:  # for evaluation: the tokens that fill up the last window must not have loss twice
            targets = (samples % self.samples_per_epoch * self.length)[:, None] + np.arange(1, self.length + 1)
            labels[targets >= self.store.tokens] = IGNORED
        return SampleArrays(inputs, labels, documents)

    def find_documents(self, samples: NDArray[np.int64]) -> SampleDocuments:
        """The documents in these windows."""
        sample_rows = []
        documents = []
        for epoch, rows in _rows_by_epoch(samples, self.samples_per_epoch):
            spans = self._find_spans(epoch, samples[rows] % self.samples_per_epoch)
            sample_rows.append(rows[spans.rows])
            documents.append(spans.documents)
        return SampleDocuments(np.concatenate(sample_rows), np.concatenate(documents))

    def _document_at(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the documents at these positions of the epoch's order."""
        return positions if self.seed is None else permute(len(self.store), positions, self.seed, _DOCUMENTS_KEY, epoch)

    def _document_ends(self, epoch: int) -> NDArray[np.int64]:
        """Where each document ends in the epoch's stream of shuffled documents."""

        def build_counts() -> CountAt:
            lengths = self.store.document_lengths()
            return lambda positions: lengths[self._document_at(epoch, positions)].astype(np.int64)

        order = "as it is" if self.seed is None else self.seed  # part of the cache key
        path = prefix_sums_path(self.folder, self.store, epoch, "packed", order)
        self.store.advise(random=False)
        ends = prefix_sums(len(self.store), build_counts, path)
        self.store.advise(random=self.seed is not None)
        return ends

    def _find_spans(self, epoch: int, positions: NDArray[np.int64]) -> Spans:
        """Find the document spans of the windows at these positions of the epoch."""
        windows = positions
        if self.seed is not None:
            windows = permute(self.samples_per_epoch, positions, self.seed, _WINDOWS_KEY, epoch)
        ends = self.document_ends(epoch)
        tokens = self.store.tokens
        rows = np.arange(len(windows))
        stream_starts = windows * self.length
        remaining = np.full(len(windows), self.length + 1)
        span_groups: list[Spans] = []
        while len(rows):  # again for windows that reach the end of the epoch and continue at its start
            counts = np.minimum(remaining, tokens - stream_starts)
            span_groups.append(self._cut_at_documents(epoch, ends, rows, stream_starts, counts))
            unfinished = remaining > counts
            rows = rows[unfinished]
            remaining = (remaining - counts)[unfinished]
            stream_starts = np.zeros_like(remaining)
        if len(span_groups) == 1:
            return span_groups[0]
        joined = [
            np.concatenate([getattr(spans, name) for spans in span_groups])
            for name in ("rows", "documents", "starts", "counts")
        ]
        order = np.argsort(joined[0], kind="stable")
        return Spans(*(array[order] for array in joined))

    def _cut_at_documents(
        self,
        epoch: int,
        ends: NDArray[np.int64],
        rows: NDArray[np.int64],
        stream_starts: NDArray[np.int64],
        counts: NDArray[np.int64],
    ) -> Spans:
        """Split ranges of the epoch's token stream at document boundaries; no range may pass the end of the stream.

        If documents end at 12, 20 and 30, the range of 15 tokens from 10 on has spans of 2, 8 and 5 tokens.
        """
        first = np.searchsorted(ends, stream_starts, side="right")
        last = np.searchsorted(ends, stream_starts + counts - 1, side="right")
        per_range = last - first + 1
        ranges = np.repeat(np.arange(len(rows)), per_range)
        positions = expand_ranges(first, per_range)
        document_stops = np.asarray(ends[positions])
        document_begins = np.where(positions > 0, np.asarray(ends[np.maximum(positions - 1, 0)]), 0)
        starts = np.maximum(stream_starts[ranges], document_begins)
        sizes = np.minimum((stream_starts + counts)[ranges], document_stops) - starts
        documents = self._document_at(epoch, positions)
        has_tokens = sizes > 0
        store_starts = self.store.document_starts(documents) + starts - document_begins
        return Spans(rows[ranges][has_tokens], documents[has_tokens], store_starts[has_tokens], sizes[has_tokens])


def _rows_by_epoch(samples: NDArray[np.int64], per_epoch: int) -> list[tuple[int, NDArray[np.int64]]]:
    """Return each epoch that the samples belong to, and which of the samples do."""
    epochs = samples // per_epoch
    return [(int(epoch), np.flatnonzero(epochs == epoch)) for epoch in np.unique(epochs)]


def number_spans(rows: NDArray[np.int64]) -> NDArray[np.int32]:
    """Number the spans of each row 1, 2, 3 ...; `rows` is the row of each span, in ascending order.

    [0 0 1 1 1] -> [1 2 1 2 3]
    """
    first = np.searchsorted(rows, rows, side="left")
    return (np.arange(len(rows)) - first + 1).astype(np.int32)


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
    """Yield windows of `length` tokens that start every `stride` tokens: all of them, or those that `samples` names.

    Inputs are the labels shifted by one; `first_input` is the input at the first token, which has none before it. If
    it is None, the first token is only an input.

    The first window has loss on all its tokens. Later windows have loss only on tokens that no earlier window
    predicted. Tokens after the first window have at least `length - stride` tokens of context. The ids 1 to 6 with
    length 4, stride 2 and first input 0 (- is -100):

        inputs  [0 1 2 3]  [2 3 4 5]
        labels  [1 2 3 4]  [- - 5 6]
    """
    if samples is None:
        samples = np.arange(count_windows(store, length=length, stride=stride, first_input=first_input), dtype=np.int64)
    first_label, pad = (1, int(store.ids[0])) if first_input is None and store.tokens else (0, first_input or 0)
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
        yield Batch(inputs=inputs, labels=labels, samples=numbers)
