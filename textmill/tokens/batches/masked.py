"""The masked layout of BERT and RoBERTa: samples of one or more spans of text, with other tokens masked in each epoch.

A span is a sentence pair or full sentences without a pair (sentence_pairs.py). Two sentence pairs
"a b | c" and "d | e" in one sample of 12 tokens ("-" in labels is -100; the second pair is in the wrong order):

    inputs       [CLS] a [MASK] [SEP] c [SEP] [CLS] d [SEP] e [SEP] [PAD]
    labels         -   -   b      -   -   -     -   -   -   -   -     -
    documents      1   1   1      1   1   1     2   2   2   2   2     0
    types          0   0   0      0   1   1     0   0   0   1   1     0
    pair_labels    0   -   -      -   -   -     1   -   -   -   -     -
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.config import MaskedConfig
from textmill.counters import hash_counters
from textmill.errors import TextmillError
from textmill.ranges import expand_ranges
from textmill.tokens.batches.batch import (
    IGNORED,
    Batch,
    Numbers,
    cache_key,
    cached_array,
    check_ids,
    gather_ranges,
    number_spans,
    shuffle_in_epoch,
)
from textmill.tokens.batches.masking import MaskedTokens, choose_tokens, replace_tokens
from textmill.tokens.batches.sentence_pairs import FullSentences, Segments, SentencePairs, Sentences
from textmill.tokens.store import TokenStore

_SAMPLES_KEY = 8
_SPANS_KEY = 9
"""Keys of the shuffle of samples in each epoch, and of the random numbers of each span."""
MIN_LENGTH = 8
"""The shortest sample: three special tokens and some text."""

Pattern = tuple[tuple[int, ...], int]
"""The lengths of the items in a row, and how many rows have these lengths."""


@dataclass(frozen=True)
class JoinedSpans:
    """Some spans with their special tokens, one after the other: [CLS] A [SEP] B [SEP] [CLS] A [SEP] B [SEP] ...

    Each array has one entry per token, but `starts` and `lengths` have one per span.
    """

    ids: NDArray[np.int32]
    types: NDArray[np.int32]
    """0 in A and its [SEP], 1 in B and its [SEP]."""
    is_sentence_start: NDArray[np.bool_]
    """A word never continues from one sentence into the next, even if its first token could continue a word."""
    starts: Numbers
    """The position of each span's [CLS]."""
    lengths: Numbers
    """The tokens of each span, special ones included."""


@dataclass(eq=False)
class MaskedLayout:
    """Samples of one or more spans, isolated from each other. Without a seed, in the order of the packing.

    Which spans share a sample is fixed for the run; each epoch shuffles the samples, cuts the spans into pairs again
    and masks other tokens. All of it is computed from the seed, the epoch and the number of the span.
    """

    store: TokenStore
    _: KW_ONLY
    length: int
    seed: int | None
    tokens: MaskedTokens
    settings: MaskedConfig
    folder: Path | None = None
    """For a cache of the packing; None: it is computed in memory."""
    packs: bool = True
    """Whether several short samples share a row, isolated from each other, so that little padding is left."""

    def __post_init__(self) -> None:
        if self.length < MIN_LENGTH:
            raise TextmillError(
                f"train.length: {self.length} is too short for train.layout=masked; set at least {MIN_LENGTH}"
            )
        self.sentences = Sentences(self.store, self.tokens.bos_id, self.tokens.eos_id)
        self.source = self._open_source()
        self.special_tokens = self.source.segments + 1
        """The special tokens of a span: [CLS], and a [SEP] after each segment."""
        self.spans, self.row_starts = self._open_packing()
        """The spans in the order of the samples that they are packed into, and the first span of each sample."""
        self.store.advise(random=self.seed is not None)
        self.samples_per_epoch = len(self.row_starts) - 1

    def build_samples(self, samples: Numbers) -> Batch:
        """The samples with these numbers."""
        rows, spans, keys = self._find_spans(samples)
        segments = self.source.find_segments(spans, keys)
        joined = self._join(segments)
        check_ids(joined.ids, self.tokens.vocab, self.store.prefix)

        rule = self.tokens.rule
        is_predicted = choose_tokens(joined.ids, joined.lengths, keys, rule, joined.is_sentence_start)
        inputs = replace_tokens(joined.ids, is_predicted, joined.lengths, keys, rule)
        labels = np.where(is_predicted, joined.ids, np.int32(IGNORED))
        documents = np.repeat(number_spans(rows), joined.lengths)

        tokens_per_row = np.bincount(rows, joined.lengths, len(samples)).astype(np.int64)
        is_text = np.arange(self.length) < tokens_per_row[:, None]
        pair_labels = None
        if segments.labels is not None:  # the label of each span at its [CLS]
            label_by_token = np.full(len(joined.ids), IGNORED, np.int32)
            label_by_token[joined.starts] = segments.labels
            pair_labels = _split_into_rows(label_by_token, is_text, IGNORED)
        return Batch(
            samples=samples,
            inputs=_split_into_rows(inputs, is_text, self.tokens.pad_id),
            labels=_split_into_rows(labels, is_text, IGNORED),
            documents=_split_into_rows(documents, is_text, 0),
            types=_split_into_rows(joined.types, is_text, 0),
            pair_labels=pair_labels,
        )

    def find_documents(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """(row, document) for every document in these samples, each once per sample."""
        rows, spans, keys = self._find_spans(samples)
        documents_of_segments = self.source.find_documents(spans, keys)
        pairs = np.concatenate([np.stack([rows, documents], axis=1) for documents in documents_of_segments])
        found = np.unique(pairs, axis=0)
        return found[:, 0], found[:, 1]

    def _find_spans(self, samples: Numbers) -> tuple[Numbers, Numbers, NDArray[np.uint64]]:
        """(row, span, key of its random numbers in this epoch) for every span in these samples."""
        epochs = samples // self.samples_per_epoch
        packed = shuffle_in_epoch(samples, self.samples_per_epoch, self.seed, _SAMPLES_KEY)
        first = np.asarray(self.row_starts[packed])
        spans_per_row = np.asarray(self.row_starts[packed + 1]) - first
        rows = np.repeat(np.arange(len(samples)), spans_per_row)
        numbers = expand_ranges(first, spans_per_row)
        numbers_in_run = epochs[rows] * len(self.spans) + numbers
        return rows, self.spans[numbers], hash_counters(numbers_in_run, self.seed or 0, _SPANS_KEY)

    def _join(self, segments: Segments) -> JoinedSpans:
        """Spans of A = 2 and B = 1 tokens, then 1 and 1: [CLS] at 0 and 6, [SEP] at 3, 5 and 8, 10."""
        lengths = segments.counts.sum(axis=1) + self.special_tokens
        span_starts = np.cumsum(lengths) - lengths
        separators = span_starts[:, None] + np.cumsum(segments.counts + 1, axis=1)
        segment_starts = separators - segments.counts

        is_special = np.zeros(int(lengths.sum()), np.bool_)
        is_special[span_starts] = True
        is_special[separators] = True
        ids = np.empty(len(is_special), np.int32)
        ids[span_starts] = self.tokens.cls_id
        ids[separators] = self.tokens.sep_id
        ids[~is_special] = gather_ranges(self.sentences.ids, segments.starts.ravel(), segments.counts.ravel())

        types = (np.arange(len(ids)) > np.repeat(separators[:, 0], lengths)).astype(np.int32)
        is_sentence_start = np.zeros(len(ids), np.bool_)
        is_sentence_start[self._locate_sentences(segments, segment_starts)] = True
        return JoinedSpans(ids, types, is_sentence_start, span_starts, lengths)

    def _locate_sentences(self, segments: Segments, segment_starts: Numbers) -> Numbers:
        """The positions in the joined spans where sentences start; the segments start at `segment_starts` there."""
        begins = segments.starts.ravel()
        ends = begins + segments.counts.ravel()
        first = self.sentences.count_before(begins, "left")
        sentences_per_segment = self.sentences.count_before(ends, "left") - first
        in_store = self.sentences.starts(expand_ranges(first, sentences_per_segment))
        return in_store + np.repeat(segment_starts.ravel() - begins, sentences_per_segment)

    def _open_source(self) -> SentencePairs | FullSentences:
        """The rule that finds spans; the special tokens leave less than `length` for their text."""
        if self.settings.pairs == "none":
            return FullSentences(self.sentences, self.length - FullSentences.segments - 1)
        return SentencePairs(
            self.sentences,
            self.settings.pairs,
            self.length - SentencePairs.segments - 1,
            self.settings.short_probability,
            self.seed or 0,
        )

    def _open_packing(self) -> tuple[Numbers, Numbers]:
        """(spans in the order of the rows, the first span of each row and where the last row ends), maybe of a cache.

        The cache file has the number of spans, three numbers per span, and the row starts.
        """
        path = None
        if self.folder is not None:
            rules = [self.settings.pairs, self.packs, self.settings.short_probability, self.length, self.seed or 0]
            key = cache_key(self.store, *rules, self.tokens.bos_id, self.tokens.eos_id)
            path = self.folder / f"{self.store.prefix.name}-{key}.spans"
        numbers = cached_array(path, np.int64, self._pack_spans)
        spans_end = 1 + 3 * int(numbers[0])
        return numbers[1:spans_end].reshape(-1, 3), numbers[spans_end:]

    def _pack_spans(self) -> tuple[Numbers, Numbers, Numbers]:
        spans = np.concatenate([np.zeros((0, 3), np.int64), *map(self.source.find_spans, self.sentences.blocks())])
        if not len(spans):
            pairs = self.settings.pairs
            missing = (
                "has no text to train on; add some"
                if pairs == "none"
                else f"no document has two sentences, which train.masked.pairs={pairs} needs; make them with "
                f"corpus.sentences=split and tokens.level=sentence, or set train.masked.pairs=none"
            )
            raise TextmillError(f"{self.store.prefix}: {missing}")
        row_starts = np.arange(len(spans) + 1)
        if self.packs:
            max_tokens = spans[:, 2]
            order, row_starts = pack_rows(max_tokens + self.special_tokens, self.length)
            spans = spans[order]
        return np.array([len(spans)]), spans, row_starts


def _split_into_rows(values: NDArray[np.int32], is_text: NDArray[np.bool_], padding: int) -> NDArray[np.int32]:
    """[rows, length] with the values, in order, where `is_text` is true, and padding elsewhere."""
    rows = np.full(is_text.shape, padding, np.int32)
    rows[is_text] = values
    return rows


def has_spans(store: TokenStore, settings: MaskedConfig) -> bool:
    """True if a store gives at least one sample."""
    sentences_per_document = np.diff(store.index.documents[store.first_document :][: len(store) + 1])
    needed = 1 if settings.pairs == "none" else 2
    return bool((sentences_per_document >= needed).any())


def pack_rows(lengths: Numbers, longest: int) -> tuple[Numbers, Numbers]:
    """Pack items of known lengths into rows of one length, so that little padding is left (histogram packing).

    Returns (items in the order of their rows, where each row starts in that order and where the last one ends). The
    work depends on the number of different lengths, not on the number of items.

    Items of the lengths 5, 3, 2, 6, 1, 3 in rows of 8 -> items [0 1 | 3 2 | 5 4] (5 + 3, 6 + 2, 3 + 1), rows at
    [0 2 4 6].
    """
    counts = np.bincount(lengths, minlength=longest + 1)
    by_length = np.argsort(lengths, kind="stable")
    next_item = (np.cumsum(counts) - counts).tolist()  # of each length, as an index into `by_length`
    items = [np.zeros(0, np.int64)]
    items_per_row = [np.zeros(0, np.int64)]
    for pattern, rows in find_patterns(counts.tolist(), longest):
        columns = []
        for length in pattern:
            columns.append(by_length[next_item[length] : next_item[length] + rows])
            next_item[length] += rows
        items.append(np.stack(columns, axis=1).ravel())
        items_per_row.append(np.full(rows, len(pattern)))
    row_ends = np.cumsum(np.concatenate(items_per_row))
    return np.concatenate(items), np.concatenate([np.zeros(1, np.int64), row_ends])


def find_patterns(counts: list[int], longest: int) -> list[Pattern]:
    """How to combine counts[length] items of each length into rows: the longest first, into the fullest row that has
    space (best-fit decreasing)."""
    by_space: list[list[Pattern]] = [[] for _ in range(longest + 1)]
    for length in range(longest, 0, -1):
        left = counts[length]
        for space in range(length, longest):
            opened = by_space[space]
            by_space[space] = []
            for pattern, rows in opened:
                left, full = _fill(by_space, pattern, rows, space, length, left)
                if full < rows:
                    by_space[space].append((pattern, rows - full))
            if not left:
                break
        if left:
            each = longest // length
            _fill(by_space, (), -(-left // each), longest, length, left)
    return [pattern for patterns in by_space for pattern in patterns]


def _fill(
    by_space: list[list[Pattern]], pattern: tuple[int, ...], rows: int, space: int, length: int, left: int
) -> tuple[int, int]:
    """Put `left` items of a length into rows of a pattern, as many as fit into each; (items left, rows used)."""
    each = space // length
    used = min(rows, left // each)
    if used:
        by_space[space - each * length].append(((*pattern, *[length] * each), used))
        left -= used * each
    if left and used < rows and left < each:
        by_space[space - left * length].append(((*pattern, *[length] * left), 1))
        left = 0
        used = used + 1
    return left, used
