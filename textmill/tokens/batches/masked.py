"""The masked layout: BERT's sentence pairs, or RoBERTa's full sentences, packed into samples and masked again in each
epoch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.config import MaskedConfig
from textmill.counters import hash_counters
from textmill.errors import TextmillError
from textmill.storage.files import atomic_writer, file_lock, hash_json
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.batches.full_sentences import FullSentences
from textmill.tokens.batches.layout import SampleArrays, SampleDocuments, check_ids, gather_ranges
from textmill.tokens.batches.masked_tokens import MaskedTokens
from textmill.tokens.batches.masking import choose_tokens, replace_tokens
from textmill.tokens.batches.packed import number_spans
from textmill.tokens.batches.row_packing import pack_rows
from textmill.tokens.batches.sentence_pairs import Segments, SentencePairs
from textmill.tokens.batches.sentences import Numbers, Sentences
from textmill.tokens.batches.shuffle import shuffle_in_epoch
from textmill.tokens.store import TokenStore

_SAMPLES_KEY, _SPANS_KEY = 8, 9
"""Keys of the shuffle of samples in each epoch, and of the random numbers of each span."""
MIN_LENGTH = 8
"""The shortest sample: three special tokens and some text."""


@dataclass(frozen=True)
class Joined:
    """Spans with their special tokens, joined: [CLS] A [SEP] B [SEP] [CLS] A [SEP] ..."""

    ids: NDArray[np.int32]
    types: NDArray[np.int32]
    """0 in A and up to its [SEP], 1 after it."""
    starts: NDArray[np.bool_]
    """True where a sentence or a segment starts."""
    lengths: Numbers
    """The tokens of each span, special ones included."""


class MaskedLayout:
    """Samples of one or more spans of text, isolated from each other. Without a seed, in the order of the packing.

    Which spans share a sample is fixed for the run; each epoch shuffles the samples, cuts the spans into pairs again
    and masks other tokens. All of it is computed from the seed, the epoch and the number of the span.
    """

    def __init__(
        self, store: TokenStore, *, length: int, seed: int | None, tokens: MaskedTokens, settings: MaskedConfig,
        vocab: int | None = None, folder: Path | None = None,
    ) -> None:  # fmt: skip
        if length < MIN_LENGTH:
            raise TextmillError(
                f"train.length: {length} is too short for train.layout=masked; set at least {MIN_LENGTH}"
            )
        self.store, self.length, self.seed, self.tokens, self.vocab = store, length, seed, tokens, vocab
        self.ids, self.sentences = np.asarray(store.ids), Sentences(store)
        self.source = self._new_source(settings, 0 if seed is None else seed)
        self.special_tokens = self.source.segments + 1
        self.spans, self.row_starts = self._open_spans(settings, folder)
        store.advise(random=seed is not None)
        self.samples_per_epoch = len(self.row_starts) - 1

    def _new_source(self, settings: MaskedConfig, seed: int) -> SentencePairs | FullSentences:
        documents, begin, end = len(self.store), self.tokens.begin, self.tokens.end
        if settings.pairs == "none":
            return FullSentences(
                self.ids, self.sentences, documents=documents, longest=self.length - 2, begin=begin, end=end
            )
        return SentencePairs(
            self.ids, self.sentences, documents=documents, label=settings.pairs, longest=self.length - 3,
            short_probability=settings.short_probability, seed=seed, begin=begin, end=end,
        )  # fmt: skip

    def build_samples(self, samples: NDArray[np.int64]) -> SampleArrays:
        """The samples with these numbers."""
        rows, spans, keys = self._find(samples)
        segments = self.source.find_segments(self.spans[spans], keys)
        joined = self._join(segments)
        check_ids(joined.ids, self.vocab, self.store.prefix)
        rule = self.tokens.rule
        chosen = choose_tokens(joined.ids, joined.lengths, keys, rule, joined.starts)
        used = np.bincount(rows, joined.lengths, len(samples)).astype(np.int64)
        filled = np.arange(self.length) < used[:, None]

        def in_rows(values: NDArray[np.int32], padding: int) -> NDArray[np.int32]:
            array = np.full(filled.shape, padding, np.int32)
            array[filled] = values
            return array

        pair_labels = None
        if segments.labels is not None:
            first = np.zeros_like(joined.ids) + np.int32(IGNORED)
            first[np.cumsum(joined.lengths) - joined.lengths] = segments.labels
            pair_labels = in_rows(first, IGNORED)
        return SampleArrays(
            in_rows(replace_tokens(joined.ids, chosen, joined.lengths, keys, rule), self.tokens.pad),
            in_rows(np.where(chosen, joined.ids, np.int32(IGNORED)), IGNORED),
            documents=in_rows(np.repeat(number_spans(rows), joined.lengths), 0),
            types=in_rows(joined.types, 0),
            pair_labels=pair_labels,
        )

    def find_documents(self, samples: NDArray[np.int64]) -> SampleDocuments:
        """The documents in these samples, each once per sample."""
        rows, spans, keys = self._find(samples)
        columns = self.source.find_documents(self.spans[spans], keys)
        pairs = np.concatenate([np.stack([rows, documents], axis=1) for documents in columns])
        found = np.unique(pairs, axis=0)
        return SampleDocuments(found[:, 0], found[:, 1])

    def _find(self, samples: NDArray[np.int64]) -> tuple[Numbers, Numbers, NDArray[np.uint64]]:
        """(row, span, key of its random numbers) for every span in these samples."""
        packed = shuffle_in_epoch(samples, self.samples_per_epoch, self.seed, _SAMPLES_KEY)
        first = np.asarray(self.row_starts[packed])
        per_row = np.asarray(self.row_starts[packed + 1]) - first
        rows = np.repeat(np.arange(len(samples)), per_row)
        spans = np.arange(len(rows)) + np.repeat(first - (np.cumsum(per_row) - per_row), per_row)
        counters = (samples // self.samples_per_epoch)[rows] * len(self.spans) + spans
        return rows, spans, hash_counters(counters, self.seed or 0, _SPANS_KEY)

    def _join(self, segments: Segments) -> Joined:
        counts = segments.counts
        lengths = counts.sum(1) + self.special_tokens
        ends = np.cumsum(lengths)
        ids = np.full(int(lengths.sum()), self.tokens.sep, np.int32)
        ids[ends - lengths] = self.tokens.cls
        after = (ends - lengths)[:, None] + 1 + np.cumsum(counts + 1, axis=1)  # where each segment and its [SEP] end
        is_text = np.ones(len(ids), np.bool_)
        is_text[ends - lengths] = False
        is_text[(after - 1).ravel()] = False
        ids[is_text] = gather_ranges(self.ids, segments.starts.ravel(), counts.ravel())
        types = (np.arange(len(ids)) >= np.repeat(after[:, 0], lengths)).astype(np.int32)
        return Joined(ids, types, self._sentence_starts(segments, after - 1 - counts, len(ids)), lengths)

    def _sentence_starts(self, segments: Segments, places: Numbers, size: int) -> NDArray[np.bool_]:
        """Where sentences start in the joined spans, whose segments start at `places`."""
        is_start = np.zeros(size, np.bool_)
        starts, counts = segments.starts.ravel(), segments.counts.ravel()
        first = self.sentences.count_before(starts, "left")
        number = self.sentences.count_before(starts + counts, "left") - first
        sentences = np.arange(number.sum()) + np.repeat(first - (np.cumsum(number) - number), number)
        is_start[self.sentences.starts(sentences) + np.repeat(places.ravel() - starts, number)] = True
        return is_start

    def _open_spans(self, settings: MaskedConfig, folder: Path | None) -> tuple[Numbers, Numbers]:
        """(spans in the order of the rows, where each row starts): in memory, or memory-mapped from a cache file.

        One process writes the cache file while the others wait.
        """
        if folder is None:
            return self._pack_spans(settings)
        stat = self.store.index.path.stat()
        documents = [self.store.first_document, self.store.document_count]
        rules = [settings.pairs, settings.pack, settings.short_probability, self.length, self.seed or 0]
        tokens = [self.tokens.begin, self.tokens.end]
        key = hash_json([str(self.store.prefix.resolve()), stat.st_size, stat.st_mtime_ns, *documents, *rules, *tokens])
        path = folder / f"{self.store.prefix.name}-{key[:20]}.spans"
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(path.with_name("lock"), None):
            if not path.exists():
                spans, starts = self._pack_spans(settings)
                with atomic_writer(path) as stream:
                    for part in (np.array([len(spans)]), spans, starts):
                        stream.write(np.ascontiguousarray(part, np.int64).data)
        mapped = np.memmap(path, np.int64, "r")
        count = int(mapped[0])
        return mapped[1 : 1 + 3 * count].reshape(-1, 3), mapped[1 + 3 * count :]

    def _pack_spans(self, settings: MaskedConfig) -> tuple[Numbers, Numbers]:
        spans = np.concatenate([np.zeros((0, 3), np.int64), *self.source.find_spans()])
        if not len(spans):
            missing = (
                "has no text to train on; add some"
                if settings.pairs == "none"
                else f"no document has two sentences, which train.masked.pairs={settings.pairs} needs; make them with "
                f"corpus.sentences=split and tokens.level=sentence, or set train.masked.pairs=none"
            )
            raise TextmillError(f"{self.store.prefix}: {missing}")
        if not settings.pack:
            return spans, np.arange(len(spans) + 1)
        order, starts = pack_rows(spans[:, 2] + self.special_tokens, self.length)
        return spans[order], starts


def has_spans(store: TokenStore, settings: MaskedConfig) -> bool:
    """Whether a store gives at least one sample."""
    sentences = Sentences(store)
    counts = np.diff(sentences.first_of(np.arange(len(store) + 1)))
    return bool((counts > (settings.pairs != "none")).any())
