"""Where the sentences (sequences) of a store start, by number; nothing is loaded into memory."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from textmill.tokens.store import TokenStore

Numbers = NDArray[np.int64]


class Sentences:
    """The sentences of a store's documents, numbered from 0."""

    def __init__(self, store: TokenStore) -> None:
        index = store.index
        begin, end = store.first_document, store.first_document + store.document_count
        self._documents = np.asarray(index.documents[begin : end + 1])
        self._first = int(self._documents[0])
        self.count = int(self._documents[-1]) - self._first
        self._offsets = np.asarray(index.offsets[self._first : self._first + self.count])
        self._divisor, self._tokens = index.offset_divisor, store.tokens
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

    def document_of(self, numbers: Numbers) -> Numbers:
        """The document of each sentence."""
        return search_sorted(self._documents, numbers + self._first, "right") - 1


def search_sorted(values: Numbers, wanted: Numbers, side: Literal["left", "right"]) -> Numbers:
    """np.searchsorted without a copy: numpy would copy all of an index file, whose numbers are not aligned."""
    low, high = np.zeros(wanted.shape, np.int64), np.full(wanted.shape, len(values), np.int64)
    for _ in range(len(values).bit_length()):
        middle = (low + high) // 2
        found = values[np.minimum(middle, len(values) - 1)]
        goes_right = (low < high) & ((found < wanted) if side == "left" else (found <= wanted))
        low, high = np.where(goes_right, middle + 1, low), np.where(goes_right, high, middle)
    return low
