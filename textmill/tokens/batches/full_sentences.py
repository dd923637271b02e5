"""Full sentences of one document for a masked model without a pair label, as in RoBERTa (its DOC-SENTENCES)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from textmill.tokens.batches.sentence_pairs import Keys, Segments
from textmill.tokens.batches.sentences import Numbers, Sentences


@dataclass(frozen=True)
class FullSentences:
    """Spans of as many consecutive sentences of a document as fit; only a longer sentence is cut."""

    segments: ClassVar[int] = 1
    sentences: Sentences
    longest: int
    """The most tokens of a span."""

    def find_spans(self) -> Iterator[Numbers]:
        """[spans, (first token, token after the last, tokens)] for blocks of documents, in their order."""
        for edges in self.sentences.blocks():
            yield self._spans_between(edges)

    def _spans_between(self, edges: Numbers) -> Numbers:
        """The spans of consecutive documents; `edges` are the first sentence of each, and the end of the last.

        The next span of a document starts where the one before stops, so each round of the loop finds one span per
        document.
        """
        token_starts = self.sentences.starts(np.arange(edges[0], edges[-1] + 1))
        document_edges = token_starts[edges - edges[0]]
        has_tokens = np.diff(document_edges) > 0
        firsts = self.sentences.skip_begin(document_edges[:-1][has_tokens])
        document_stops = self.sentences.skip_end(document_edges[1:][has_tokens])
        rounds = [np.zeros((0, 3), np.int64)]
        while (has_text := firsts < document_stops).any():
            firsts = firsts[has_text]
            document_stops = document_stops[has_text]
            last_fitting = token_starts[np.searchsorted(token_starts, firsts + self.longest, side="right") - 1]
            stops = np.where(last_fitting > firsts, last_fitting, firsts + self.longest)
            stops = np.minimum(stops, document_stops)
            rounds.append(np.stack([firsts, stops, stops - firsts], axis=1))
            firsts = stops
        spans = np.concatenate(rounds)
        return spans[np.argsort(spans[:, 0])]

    def find_documents(self, spans: Numbers, keys: Keys) -> list[Numbers]:
        """The document of each span."""
        return [self.sentences.document_of(self.sentences.count_before(spans[:, 0], "right") - 1)]

    def find_segments(self, spans: Numbers, keys: Keys) -> Segments:
        """Each span as one segment."""
        return Segments(spans[:, :1], spans[:, 2:])
