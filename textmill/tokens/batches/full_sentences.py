"""Full sentences of one document for a masked model without a pair label, as in RoBERTa (its DOC-SENTENCES)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from textmill.tokens.batches.sentence_pairs import BLOCK, Keys, Segments
from textmill.tokens.batches.sentences import Numbers, Sentences


class FullSentences:
    """Spans of as many consecutive sentences of a document as fit; only a longer sentence is cut."""

    segments = 1

    def __init__(
        self, ids: NDArray[np.int64], sentences: Sentences, *, documents: int, longest: int, begin: int | None, end: int
    ) -> None:
        """`longest` is the most tokens of a span; `begin` and `end` tokens of documents are left out."""
        self.ids, self.sentences, self.documents, self.longest = ids, sentences, documents, longest
        self.begin, self.end = begin, end

    def find_spans(self) -> Iterator[Numbers]:
        """[spans, (first token, token after the last, most tokens)] for blocks of documents, in their order."""
        for start in range(0, self.documents, BLOCK):
            edges = self.sentences.first_of(np.arange(start, min(start + BLOCK, self.documents) + 1))
            yield self._spans_between(edges)

    def _spans_between(self, edges: Numbers) -> Numbers:
        """The spans of consecutive documents; all documents take a step at a time."""
        tokens = self.sentences.starts(np.arange(edges[0], edges[-1] + 1))
        firsts, stops = tokens[edges[:-1] - edges[0]], tokens[edges[1:] - edges[0]]
        firsts, stops = firsts[firsts < stops], stops[firsts < stops]
        if self.begin is not None:
            firsts = firsts + (self.ids[firsts] == self.begin)
        stops = stops - (self.ids[stops - 1] == self.end)
        found = [np.zeros((0, 3), np.int64)]
        firsts, stops = firsts[firsts < stops], stops[firsts < stops]
        while len(firsts):
            full = tokens[np.searchsorted(tokens, firsts + self.longest, side="right") - 1]
            lasts = np.minimum(np.where(full > firsts, full, firsts + self.longest), stops)
            found.append(np.stack([firsts, lasts, lasts - firsts], axis=1))
            left = lasts < stops
            firsts, stops = lasts[left], stops[left]
        spans = np.concatenate(found)
        return spans[np.argsort(spans[:, 0])]

    def find_documents(self, spans: Numbers, keys: Keys) -> list[Numbers]:
        """The document of each span."""
        return [self.sentences.document_of(self.sentences.count_before(spans[:, 0], "right") - 1)]

    def find_segments(self, spans: Numbers, keys: Keys) -> Segments:
        """Each span as one segment."""
        return Segments(spans[:, :1], spans[:, 2:])
