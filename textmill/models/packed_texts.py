"""Texts of different lengths as rows of tokens, several in a row, so that hardly any padding is computed.

Shapes in names: N rows, T tokens of a row, U texts, M tokens of all texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from textmill.ranges import expand_ranges

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class PackedTexts:
    """The input of one forward pass, and where each text is."""

    ids_NT: Ids
    documents_NT: Ids | None
    """The number of each token's text in its row from 1 on; 0 and -1 in turn for padding, so that each padding token is
    at position 0 of its own text, however many there are. None if every row is one whole text."""
    numbers_U: Ids
    """Which of all texts are here."""
    starts_U: Ids
    """Where each text starts in the flat array of all tokens."""
    lengths_U: Ids

    @property
    def places_M(self) -> Ids:
        """Where the tokens of the texts are in the flat array, text after text."""
        return expand_ranges(self.starts_U, self.lengths_U)

    @property
    def texts_M(self) -> Ids:
        """The place in `numbers_U` of each of these tokens' text."""
        return np.repeat(np.arange(len(self.lengths_U)), self.lengths_U)


def pack_texts(texts: Sequence[Sequence[int] | Ids], *, row_tokens: int, batch_tokens: int) -> Iterator[PackedTexts]:
    """Divide texts into forward passes, longest first.

    A row has space for `row_tokens` tokens, or for the longest text of its batch; a batch has about `batch_tokens`.
    """
    lengths = np.array([len(text) for text in texts], np.int64)
    rows: list[list[int]] = []
    width = used = 0
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        if not rows or used + length > width:
            if rows and (len(rows) + 1) * width > batch_tokens:
                yield _fill_rows(texts, lengths, rows)
                rows = []
            width = width if rows else max(row_tokens, length)
            rows.append([])
            used = 0
        rows[-1].append(number)
        used += length
    if rows:
        yield _fill_rows(texts, lengths, rows)


def _fill_rows(texts: Sequence[Sequence[int] | Ids], lengths: Ids, rows: list[list[int]]) -> PackedTexts:
    sizes = [int(lengths[row].sum()) for row in rows]
    width = max(sizes)
    ids = np.zeros((len(rows), width), np.int64)
    documents = np.broadcast_to(-(np.arange(width) % 2), ids.shape).copy()
    starts = []
    for place, row in enumerate(rows):
        start = 0
        for document, number in enumerate(row, 1):
            stop = start + int(lengths[number])
            ids[place, start:stop], documents[place, start:stop] = texts[number], document
            starts.append(place * width + start)
            start = stop
    numbers = np.array([number for row in rows for number in row], np.int64)
    whole = len(numbers) == len(rows) and min(sizes) == width
    return PackedTexts(ids, None if whole else documents, numbers, np.array(starts, np.int64), lengths[numbers])
