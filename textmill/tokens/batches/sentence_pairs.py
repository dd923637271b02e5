"""Sentence pairs for BERT: consecutive sentences as segments A and B, sometimes in the wrong order or of two documents.

A span is a range of sentences of one document that fills a sample; spans are fixed for a run. How a span is cut into A
and B, what B is, and which ends are truncated is drawn again in each epoch. A span of the sentences s1 s2 s3 may be
A = s1, B = s2 s3 in one epoch and A = s1 s2, B = sentences of another document (label 1) in the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from textmill.counters import draw, hash_counters, to_uniform
from textmill.tokens.batches.batch import Numbers
from textmill.tokens.store import TokenStore

_TARGETS_KEY = 7
_CUT, _LABEL, _DOCUMENT, _SENTENCE = range(4)
_TRUNCATE_A = 1 << 16
_TRUNCATE_B = 1 << 20
"""What the random numbers of a span are used for; see `counters.draw`."""
Keys = NDArray[np.uint64]
"""A key for each span, from which its random numbers are drawn."""

BLOCK = 1 << 14
"""Documents in a block of `blocks`."""


@dataclass(frozen=True)
class SentencePairs:
    """Spans of two sentences or more, and how each is cut into A and B, by Megatron's rules."""

    segments: ClassVar[int] = 2
    sentences: Sentences
    label: str
    """How half of the pairs are made wrong. "next": B is from another document (BERT); "order": A and B are swapped
    (ALBERT)."""
    longest: int
    """The most tokens of A and B together."""
    short_probability: float
    """How many of the spans aim at fewer tokens than `longest`."""
    seed: int

    def find_spans(self, edges: Numbers) -> Numbers:
        """[spans, (first sentence, sentence after the last, most tokens)] of consecutive documents, in their order.

        `edges` are the first sentence of each document, and the end of the last. A span stops when it has `target`
        tokens, two sentences, and more than one sentence is left; else with the document. The next span of a document
        starts there, so each round of the loop finds one span per document.
        """
        token_starts = self.sentences.starts(np.arange(edges[0], edges[-1] + 1))

        def first_token(sentences: Numbers) -> Numbers:
            found: Numbers = token_starts[sentences - edges[0]]
            return found

        has_two = np.diff(edges) > 1
        firsts = edges[:-1][has_two]
        document_stops = edges[1:][has_two]
        rounds = [np.zeros((0, 3), np.int64)]
        while len(firsts):
            targets = self._draw_targets(firsts)
            with_target = edges[0] + np.searchsorted(token_starts, first_token(firsts) + targets)
            stops = np.maximum(with_target, firsts + 2)
            stops = np.where(document_stops - stops > 1, stops, document_stops)
            rounds.append(np.stack([firsts, stops, np.minimum(targets, first_token(stops) - first_token(firsts))], 1))
            is_unfinished = stops < document_stops
            firsts = stops[is_unfinished]
            document_stops = document_stops[is_unfinished]
        spans = np.concatenate(rounds)
        spans = spans[np.argsort(spans[:, 0])]
        max_tokens = spans[:, 2]
        return spans[max_tokens > 1]

    def _draw_targets(self, firsts: Numbers) -> Numbers:
        """The tokens that spans aim at: `longest`, or at random 2 to `longest`."""
        keys = hash_counters(firsts, self.seed, _TARGETS_KEY)
        is_short = to_uniform(draw(keys, 0)) < self.short_probability
        return np.where(is_short, 2 + _below(draw(keys, 1), np.int64(self.longest - 1)), self.longest)

    def find_documents(self, spans: Numbers, keys: Keys) -> list[Numbers]:
        """The document of A, and that of B."""
        document_a = self.sentences.document_of(spans[:, 0])
        if self.label != "next":
            return [document_a, document_a]
        return [document_a, np.where(_is_wrong(keys), self._other_documents(document_a, keys), document_a)]

    def find_segments(self, spans: Numbers, keys: Keys) -> Segments:
        """Cut each span into A and B, make half of the pairs wrong, and truncate them."""
        firsts, span_stops, max_tokens = spans.T
        sentences = span_stops - firsts
        sentences_of_a = np.where(sentences >= 3, 1 + _below(draw(keys, _CUT), np.maximum(sentences - 1, 1)), 1)
        first, middle, last = (self.sentences.starts(one) for one in (firsts, firsts + sentences_of_a, span_stops))
        starts = np.stack([self.sentences.skip_begin(first), middle], axis=1)  # [spans, A and B], in tokens
        stops = np.stack([middle, self.sentences.skip_end(last)], axis=1)
        is_wrong = _is_wrong(keys)
        if self.label == "order":
            starts[is_wrong] = starts[is_wrong, ::-1]
            stops[is_wrong] = stops[is_wrong, ::-1]
        else:
            others = self._find_other_b(spans[is_wrong], (stops - starts)[is_wrong], keys[is_wrong])
            starts[is_wrong, 1], stops[is_wrong, 1] = others
        starts, counts = truncate(starts, stops - starts, max_tokens, keys)
        return Segments(starts, counts, is_wrong.astype(np.int32))

    def _other_documents(self, documents: Numbers, keys: Keys) -> Numbers:
        """Another document for each, with equal probability; in a store of one document the same."""
        others = _below(draw(keys, _DOCUMENT), np.int64(max(1, self.sentences.documents - 1)))
        return np.minimum(others + (others >= documents), self.sentences.documents - 1)

    def _find_other_b(self, spans: Numbers, lengths: Numbers, keys: Keys) -> tuple[Numbers, Numbers]:
        """Where B starts and stops if it is from another document; `lengths` [spans, 2] are those of A and the own B.

        B is whole sentences from a random one on; from an earlier one if the document ends too soon. It has at least
        as many tokens as the own B if the pair is truncated, else at most as many, so that neither a pair's length nor
        its truncated ends reveal where B is from.
        """
        own_length = lengths[:, 1]
        is_truncated = lengths.sum(axis=1) > spans[:, 2]
        documents = self._other_documents(self.sentences.document_of(spans[:, 0]), keys)
        begins = self.sentences.first_of(documents)
        ends = self.sentences.first_of(documents + 1)
        random_firsts = np.minimum(begins + _below(draw(keys, _SENTENCE), np.maximum(ends - begins, 1)), ends)
        latest_start = np.maximum(self.sentences.starts(ends) - own_length, 0)
        latest = np.maximum(self.sentences.count_before(latest_start, "right") - 1, begins)
        firsts = np.minimum(random_firsts, latest)
        starts = self.sentences.starts(firsts)
        at_least = self.sentences.count_before(starts + own_length, "left")
        at_most = self.sentences.count_before(starts + own_length, "right") - 1
        stops = np.minimum(np.maximum(np.where(is_truncated, at_least, at_most), firsts + 1), ends)
        return self.sentences.skip_begin(starts), self.sentences.skip_end(self.sentences.starts(stops))


@dataclass(frozen=True)
class FullSentences:
    """Spans of as many consecutive sentences of a document as fit, without a pair label, as in RoBERTa (DOC-SENTENCES).

    Only a sentence that is longer than a span is cut.
    """

    segments: ClassVar[int] = 1
    sentences: Sentences
    longest: int
    """The most tokens of a span."""

    def find_spans(self, edges: Numbers) -> Numbers:
        """[spans, (first token, token after the last, tokens)] of consecutive documents, in their order.

        `edges` are the first sentence of each document, and the end of the last. The next span of a document starts
        where the one before stops, so each round of the loop finds one span per document.
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


@dataclass(frozen=True)
class Segments:
    """The segments of some spans, as ranges of a store's ids."""

    starts: Numbers
    """[spans, segments]: the first token."""
    counts: Numbers
    """[spans, segments]: how many tokens."""
    labels: NDArray[np.int32] | None = None
    """[spans]: 0 if B follows A in the text, else 1."""


def truncate(starts: Numbers, counts: Numbers, max_tokens: Numbers, keys: Keys) -> tuple[Numbers, Numbers]:
    """Remove tokens of the longer of two segments (of B if they are equal) until both together fit into `max_tokens`.

    Each token is removed from the front or the back with equal probability. Segments of 9 and 4 tokens, of which 8 fit,
    become 4 and 4.
    """
    counts = np.maximum(counts, 0)
    excess = np.maximum(counts.sum(1) - max_tokens, 0)
    a_minus_b = counts[:, 0] - counts[:, 1]
    until_equal = np.minimum(excess, np.abs(a_minus_b))
    rest = excess - until_equal
    removed_from_a = rest // 2 + np.where(a_minus_b > 0, until_equal, 0)
    removed_from_b = (rest + 1) // 2 + np.where(a_minus_b < 0, until_equal, 0)
    removed = np.stack([removed_from_a, removed_from_b], axis=1)
    front_of_a = _count_heads(keys, removed_from_a, _TRUNCATE_A)
    front_of_b = _count_heads(keys, removed_from_b, _TRUNCATE_B)
    return starts + np.stack([front_of_a, front_of_b], axis=1), counts - removed


def _count_heads(keys: Keys, tosses: Numbers, number: int) -> Numbers:
    """How many of `tosses` coins come up heads, for each key; 64 coins are the bits of one random number."""
    heads = np.zeros_like(tosses)
    rows = np.flatnonzero(tosses)
    done = 0
    while len(rows):
        coins = np.minimum(tosses[rows] - done, 64)
        bits = draw(keys[rows], number + done // 64) >> (64 - coins).astype(np.uint64)
        heads[rows] += np.bitwise_count(bits)
        done += 64
        rows = rows[tosses[rows] > done]
    return heads


def _below(bits: NDArray[np.uint64], limits: Numbers | np.int64) -> Numbers:
    """A random number from 0 up to but not including each limit."""
    numbers: Numbers = (bits % limits.astype(np.uint64)).astype(np.int64)
    return numbers


def _is_wrong(keys: Keys) -> NDArray[np.bool_]:
    """Which pairs are made wrong: half of them."""
    return (draw(keys, _LABEL) & np.uint64(1)).astype(np.bool_)


class Sentences:
    """The sentences (sequences) of a store's documents, numbered from 0; where they start is held in memory.

    `bos_id` and `eos_id`: tokens that a document of the store may begin or end with, and that are not part of its text.
    """

    def __init__(self, store: TokenStore, bos_id: int | None = None, eos_id: int | None = None) -> None:
        self.ids = np.asarray(store.ids)
        self.documents = len(store)
        self._bos_id = bos_id
        self._eos_id = eos_id
        first = store.first_document
        edges = np.array(store.index.documents[first : first + len(store) + 1])
        offsets = np.array(store.index.offsets[edges[0] : edges[-1]]) // store.index.offset_divisor
        self._firsts: Numbers = edges - edges[0]
        self._starts: Numbers = np.append(offsets - offsets[:1], store.tokens)

    def starts(self, numbers: Numbers) -> Numbers:
        """The token at which each sentence starts; the number after the last one gives its end."""
        return self._starts[numbers]

    def count_before(self, tokens: Numbers, side: Literal["left", "right"]) -> Numbers:
        """How many sentences start before each token (left), or at or before it (right)."""
        return np.searchsorted(self._starts[:-1], tokens, side)

    def first_of(self, documents: Numbers) -> Numbers:
        """The first sentence of each document; the number after the last document gives that of all sentences."""
        return self._firsts[documents]

    def blocks(self) -> Iterator[Numbers]:
        """For each block of documents: the first sentence of each document, and the end of the last document."""
        for start in range(0, self.documents, BLOCK):
            yield self.first_of(np.arange(start, min(start + BLOCK, self.documents) + 1))

    def document_of(self, numbers: Numbers) -> Numbers:
        """The document of each sentence."""
        return np.searchsorted(self._firsts, numbers, "right") - 1

    def skip_begin(self, starts: Numbers) -> Numbers:
        """Where text starts if documents, or parts of them, start at these tokens."""
        if self._bos_id is None:
            return starts
        is_begin: NDArray[np.bool_] = self.ids[np.minimum(starts, len(self.ids) - 1)] == self._bos_id
        return starts + is_begin

    def skip_end(self, stops: Numbers) -> Numbers:
        """Where text stops if documents, or parts of them, stop before these tokens."""
        if self._eos_id is None:
            return stops
        is_end: NDArray[np.bool_] = self.ids[np.maximum(stops - 1, 0)] == self._eos_id
        return stops - is_end
