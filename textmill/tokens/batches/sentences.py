"""Where the sentences (sequences) of a store start, by number; nothing is loaded into memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from textmill.tokens.store import TokenStore

Numbers = NDArray[np.int64]
BLOCK = 1 << 14
"""Documents in a block of `blocks`."""


class Sentences:
    """The sentences of a store's documents, numbered from 0.

    `begin` and `end`: tokens that a document of the store may begin or end with, and that are not part of its text.
    """

    def __init__(self, store: TokenStore, begin: int | None = None, end: int | None = None) -> None:
        self.ids, self.documents, self._begin_token, self._end_token = np.asarray(store.ids), len(store), begin, end
        index = store.index
        first = store.first_document
        stop = store.first_document + store.document_count
        self._documents = np.asarray(index.documents[first : stop + 1])
        self._first = int(self._documents[0])
        self.count = int(self._documents[-1]) - self._first
        self._offsets = np.asarray(index.offsets[self._first : self._first + self.count])
        self._divisor = index.offset_divisor
        self._tokens = store.tokens
        self._begin = int(self._offsets[0]) if self.count else 0

    def starts(self, numbers: Numbers) -> Numbers:
        """The token at which each sentence starts; number `count` gives the end of the last one."""
        if not self.count:
            return np.zeros_like(numbers)
        inside = np.minimum(numbers, self.count - 1)
        starts: Numbers = (self._offsets[inside] - self._begin) // self._divisor
        return np.where(numbers == inside, starts, self._tokens)

    def count_before(self, tokens: Numbers, side: Literal["left", "right"]) -> Numbers:
        """How many sentences start before each token (left), or at or before it (right)."""
        return search_sorted(self._offsets, tokens * self._divisor + self._begin, side)

    def first_of(self, documents: Numbers) -> Numbers:
        """The first sentence of each document; the number after the last document gives `count`."""
        found: Numbers = self._documents[documents] - self._first
        return found

    def blocks(self) -> Iterator[Numbers]:
        """For each block of documents: the first sentence of each document, and the end of the last document."""
        for start in range(0, self.documents, BLOCK):
            yield self.first_of(np.arange(start, min(start + BLOCK, self.documents) + 1))

    def document_of(self, numbers: Numbers) -> Numbers:
        """The document of each sentence."""
        return search_sorted(self._documents, numbers + self._first, "right") - 1

    def skip_begin(self, starts: Numbers) -> Numbers:
        """Where text starts if documents, or parts of them, start at these tokens."""
        if self._begin_token is None:
            return starts
        is_begin: NDArray[np.bool_] = self.ids[np.minimum(starts, len(self.ids) - 1)] == self._begin_token
        return starts + is_begin

    def skip_end(self, stops: Numbers) -> Numbers:
        """Where text stops if documents, or parts of them, stop before these tokens."""
        if self._end_token is None:
            return stops
        is_end: NDArray[np.bool_] = self.ids[np.maximum(stops - 1, 0)] == self._end_token
        return stops - is_end


def search_sorted(values: Numbers, wanted: Numbers, side: Literal["left", "right"]) -> Numbers:
    """np.searchsorted without a copy: numpy would copy all of an index file, whose numbers are not aligned."""
    low = np.zeros(wanted.shape, np.int64)
    high = np.full(wanted.shape, len(values), np.int64)
    for _ in range(len(values).bit_length()):
        middle = (low + high) // 2
        found = values[np.minimum(middle, len(values) - 1)]
        goes_right = (low < high) & ((found < wanted) if side == "left" else (found <= wanted))
        low = np.where(goes_right, middle + 1, low)
        high = np.where(goes_right, high, middle)
    return low
