"""Sentence pairs for BERT: consecutive sentences as segments A and B, sometimes in the wrong order or of two documents.

A span is a range of sentences of one document that fills a sample; spans are fixed for a run. How a span is cut into A
and B, what B is, and which ends are truncated is drawn again in each epoch. A span of the sentences s1 s2 s3 may be
A = s1, B = s2 s3 in one epoch and A = s1 s2, B = sentences of another document (label 1) in the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from textmill.counters import draw, hash_counters, to_uniform
from textmill.tokens.batches.sentences import Numbers, Sentences

BLOCK = 1 << 14
"""Documents whose spans are found at a time."""
_TARGETS_KEY = 7
_CUT, _LABEL, _DOCUMENT, _SENTENCE = range(4)
_TRUNCATE_A, _TRUNCATE_B = 1 << 16, 1 << 20
"""What the random numbers of a span are used for; see `counters.draw`."""
Keys = NDArray[np.uint64]


@dataclass(frozen=True)
class Segments:
    """The segments of some spans, as ranges of a store's ids."""

    starts: Numbers
    """[spans, segments]: the first token."""
    counts: Numbers
    """[spans, segments]: how many tokens."""
    labels: NDArray[np.int32] | None = None
    """[spans]: 0 if B follows A in the text, else 1."""


class SentencePairs:
    """Spans of at least two sentences, with Megatron's rules.

    `label`: "next" replaces B in half of the pairs by sentences of another document (BERT), "order" swaps A and B in
    half of them (ALBERT).
    """

    segments = 2

    def __init__(
        self, ids: NDArray[np.int64], sentences: Sentences, *, documents: int, label: str, longest: int,
        short_probability: float, seed: int, begin: int | None, end: int,
    ) -> None:  # fmt: skip
        """`longest` is the most tokens of A and B together; `begin` and `end` tokens of documents are left out."""
        self.ids, self.sentences, self.documents, self.label = ids, sentences, documents, label
        self.longest, self.short_probability, self.seed = longest, short_probability, seed
        self.begin, self.end = begin, end

    def find_spans(self) -> Iterator[Numbers]:
        """[spans, (first sentence, sentence after the last, most tokens)] for blocks of documents, in their order."""
        for start in range(0, self.documents, BLOCK):
            edges = self.sentences.first_of(np.arange(start, min(start + BLOCK, self.documents) + 1))
            yield self._spans_between(edges)

    def _spans_between(self, edges: Numbers) -> Numbers:
        """The spans of consecutive documents; all documents take a step at a time.

        A span ends when it has `target` tokens, two sentences, and more than one sentence is left; else with the
        document.
        """
        tokens = self.sentences.starts(np.arange(edges[0], edges[-1] + 1))
        firsts, ends = edges[:-1], edges[1:]
        firsts, ends = firsts[ends - firsts > 1], ends[ends - firsts > 1]
        span_groups = [np.zeros((0, 3), np.int64)]
        while len(firsts):
            targets = self._draw_targets(firsts)
            lasts = edges[0] + np.searchsorted(tokens, tokens[firsts - edges[0]] + targets)
            lasts = np.maximum(lasts, firsts + 2)
            lasts = np.where(ends - lasts > 1, lasts, ends)
            span_groups.append(np.stack([firsts, lasts, targets], axis=1))
            unfinished = lasts < ends
            firsts, ends = lasts[unfinished], ends[unfinished]
        spans = np.concatenate(span_groups)
        spans = spans[np.argsort(spans[:, 0])]
        spans[:, 2] = np.minimum(spans[:, 2], tokens[spans[:, 1] - edges[0]] - tokens[spans[:, 0] - edges[0]])
        return spans[spans[:, 2] > 1]

    def _draw_targets(self, firsts: Numbers) -> Numbers:
        keys = hash_counters(firsts, self.seed, _TARGETS_KEY)
        short = to_uniform(draw(keys, 0)) < self.short_probability
        return np.where(short, 2 + _below(draw(keys, 1), np.int64(self.longest - 1)), self.longest)

    def find_documents(self, spans: Numbers, keys: Keys) -> list[Numbers]:
        """The document of A, and that of B."""
        document_a = self.sentences.document_of(spans[:, 0])
        if self.label != "next":
            return [document_a, document_a]
        is_other = _is_odd(draw(keys, _LABEL))
        return [document_a, np.where(is_other, self._other_documents(document_a, keys), document_a)]

    def find_segments(self, spans: Numbers, keys: Keys) -> Segments:
        """Cut each span into A and B; its random numbers come from its key."""
        firsts, lasts, max_tokens = spans.T
        sentences = lasts - firsts
        sentences_of_a = np.where(sentences >= 3, 1 + _below(draw(keys, _CUT), np.maximum(sentences - 1, 1)), 1)
        middles = self.sentences.starts(firsts + sentences_of_a)
        starts = np.stack([self._after_begin(self.sentences.starts(firsts)), middles], axis=1)
        stops = np.stack([middles, self._before_end(self.sentences.starts(lasts))], axis=1)
        wrong = _is_odd(draw(keys, _LABEL))
        if self.label == "order":
            starts[wrong], stops[wrong] = starts[wrong, ::-1], stops[wrong, ::-1]
        else:
            lengths = (stops - starts)[wrong]
            starts[wrong, 1], stops[wrong, 1] = self._sentences_elsewhere(
                self._other_documents(self.sentences.document_of(firsts[wrong]), keys[wrong]),
                keys[wrong], lengths[:, 1], lengths.sum(1) > max_tokens[wrong],
            )  # fmt: skip
        starts, counts = truncate(starts, stops - starts, max_tokens, keys)
        return Segments(starts, counts, wrong.astype(np.int32))

    def _other_documents(self, documents: Numbers, keys: Keys) -> Numbers:
        """Another document for each, with equal probability; in a store of one document the same."""
        others = _below(draw(keys, _DOCUMENT), np.int64(max(1, self.documents - 1)))
        return np.minimum(others + (others >= documents), self.documents - 1)

    def _sentences_elsewhere(
        self, documents: Numbers, keys: Keys, lengths: Numbers, truncated: NDArray[np.bool_]
    ) -> tuple[Numbers, Numbers]:
        """Whole sentences from a random one of each document on, in place of a segment with this many tokens.

        They start earlier if the document ends too soon. They are at least as many tokens if the segment's pair is
        truncated, else at most as many, so that a pair's length and its truncated ends do not reveal where B is from.
        """
        begins, ends = self.sentences.first_of(documents), self.sentences.first_of(documents + 1)
        firsts = np.minimum(begins + _below(draw(keys, _SENTENCE), np.maximum(ends - begins, 1)), ends)
        latest = self.sentences.count_before(np.maximum(self.sentences.starts(ends) - lengths, 0), "right") - 1
        firsts = np.minimum(firsts, np.maximum(latest, begins))
        starts = self.sentences.starts(firsts)
        enough = self.sentences.count_before(starts + lengths, "left")
        fitting = self.sentences.count_before(starts + lengths, "right") - 1
        lasts = np.minimum(np.maximum(np.where(truncated, enough, fitting), firsts + 1), ends)
        return self._after_begin(starts), self._before_end(self.sentences.starts(lasts))

    def _after_begin(self, starts: Numbers) -> Numbers:
        if self.begin is None:
            return starts
        is_begin: NDArray[np.bool_] = self.ids[np.minimum(starts, len(self.ids) - 1)] == self.begin
        return starts + is_begin

    def _before_end(self, stops: Numbers) -> Numbers:
        is_end: NDArray[np.bool_] = self.ids[np.maximum(stops - 1, 0)] == self.end
        return stops - is_end


def truncate(starts: Numbers, counts: Numbers, max_tokens: Numbers, keys: Keys) -> tuple[Numbers, Numbers]:
    """Remove tokens of the longer of two segments (of B if they are equal) until both together fit into `max_tokens`.

    Each token is removed from the front or the back with equal probability. Segments of 9 and 4 tokens, of which 8 fit,
    become 4 and 4.
    """
    counts = np.maximum(counts, 0)
    excess = np.maximum(counts.sum(1) - max_tokens, 0)
    difference = counts[:, 0] - counts[:, 1]
    until_equal = np.minimum(excess, np.abs(difference))
    rest = excess - until_equal
    removed = np.stack([rest // 2, (rest + 1) // 2], axis=1)
    removed[:, 0] += np.where(difference > 0, until_equal, 0)
    removed[:, 1] += np.where(difference < 0, until_equal, 0)
    front = np.stack(
        [_count_heads(keys, removed[:, 0], _TRUNCATE_A), _count_heads(keys, removed[:, 1], _TRUNCATE_B)], 1
    )
    return starts + front, counts - removed


def _count_heads(keys: Keys, tosses: Numbers, number: int) -> Numbers:
    """How many of `tosses` coins come up heads, for each key."""
    heads, rows, word = np.zeros_like(tosses), np.flatnonzero(tosses), 0
    while len(rows):
        left = np.minimum(tosses[rows] - 64 * word, 64)
        bits = draw(keys[rows], number + word) >> (64 - left).astype(np.uint64)
        heads[rows] += np.bitwise_count(bits)
        word += 1
        rows = rows[tosses[rows] > 64 * word]
    return heads


def _below(bits: NDArray[np.uint64], limits: Numbers | np.int64) -> Numbers:
    """A random number from 0 up to but not including each limit."""
    numbers: Numbers = (bits % limits.astype(np.uint64)).astype(np.int64)
    return numbers


def _is_odd(bits: NDArray[np.uint64]) -> NDArray[np.bool_]:
    return (bits & np.uint64(1)).astype(np.bool_)
