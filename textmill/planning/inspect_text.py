"""Inspect a text: read a sample of its documents, and fit a trial vocabulary on a part of them."""

from __future__ import annotations

import hashlib
import json
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer, models

from textmill.config import CorpusConfig, TokenizerConfig
from textmill.corpus.records import BadRecord, read_records
from textmill.corpus.source import Source, SourceChunk
from textmill.corpus.sources import source_state, split_into_chunks
from textmill.errors import TextmillError
from textmill.planning.facts import TextFacts
from textmill.tokens.vocabulary.algorithms import WordCounter, new_tokenizer, train_vocabulary

SAMPLE_BYTES = 4 << 20
"""Text to read; the rest is estimated from it."""
SAMPLE_CHUNKS = 32
"""Places of the text to read from."""
SAMPLE_SECONDS = 10.0
"""Reading stops after so many seconds, whatever was read."""
HELD_OUT = 8
"""One document in this many is not used to fit the trial vocabulary."""


@dataclass
class _Sample:
    texts: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    seen: set[bytes] = field(default_factory=set)
    bytes: int = 0
    duplicate_bytes: int = 0
    documents: int = 0
    bad_records: int = 0

    def add(self, text: str) -> int:
        size = len(text.encode("utf-8", "surrogatepass"))
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self.documents, self.bytes = self.documents + 1, self.bytes + size
        if digest in self.seen:
            self.duplicate_bytes += size
        else:
            self.seen.add(digest)
            (self.held_out if len(self.seen) % HELD_OUT == 0 else self.texts).append(text)
        return size


def inspect_text(sources: Sequence[Source], corpus: CorpusConfig, vocabs: Sequence[int]) -> TextFacts:
    """The facts of a text, from a sample of at most SAMPLE_BYTES taken from its beginning, middle and end."""
    total = sum(source_state(source).bytes for source in sources)
    chunks = split_into_chunks(sources, corpus.documents)
    sample, read_bytes = _read_sample(chunks, corpus)
    if not sample.texts:
        found = f"{sample.bad_records} unreadable records" if sample.bad_records else "no text"
        raise TextmillError(f"{sources[0].name}: found {found}; name files with text, or see textmill prepare --help")
    scale = total / read_bytes if read_bytes else 1.0
    return TextFacts(
        bytes=max(sample.bytes, round(sample.bytes * scale)),
        documents=max(sample.documents, round(sample.documents * scale)),
        duplicates=sample.duplicate_bytes / max(1, sample.bytes),
        bytes_per_token=_bytes_per_token(sample, vocabs),
        scripts=_scripts(sample.texts),
    )


def _read_sample(chunks: Sequence[SourceChunk], corpus: CorpusConfig) -> tuple[_Sample, float]:
    """The sample, and how many bytes of the files it stands for."""
    places = chunks[:: max(1, len(chunks) // SAMPLE_CHUNKS)]
    share, end = SAMPLE_BYTES // len(places), time.monotonic() + SAMPLE_SECONDS
    sample, read_bytes = _Sample(), 0.0
    for chunk in places:
        taken, finished = 0, True
        for text in _texts(chunk, corpus, sample):
            taken += sample.add(text)
            if taken >= share or time.monotonic() > end:
                finished = False
                break
        size = chunk.stop - chunk.start
        # Of a chunk that was read in part, the text is taken for that part of the file: right for plain files, and for
        # compressed ones as far as they were read.
        read_bytes += size if finished else min(size, taken * _file_bytes_per_text_byte(chunk, taken))
        if time.monotonic() > end:
            break
    return sample, read_bytes


def _texts(chunk: SourceChunk, corpus: CorpusConfig, sample: _Sample) -> Iterator[str]:
    for record in read_records(chunk, corpus):
        if isinstance(record, BadRecord):
            sample.bad_records += 1
        elif record.turns is not None:
            yield "\n".join(text for _, text in record.turns)
        elif record.text:
            yield record.text


COMPRESSION = {".xz": 0.24, ".bz2": 0.26, ".gz": 0.36, ".zst": 0.32, ".parquet": 0.4, ".arrow": 1.0}
"""Bytes of a file for a byte of its text, where only a part was read."""


def _file_bytes_per_text_byte(chunk: SourceChunk, taken: int) -> float:
    suffix = "." + chunk.source.address.rpartition(".")[2]
    return COMPRESSION.get(suffix, 1.0)


def _bytes_per_token(sample: _Sample, vocabs: Sequence[int]) -> dict[int, float]:
    """One vocabulary is fitted, the largest; a smaller one is its beginning, since merges are found in that order."""
    held_out = sample.held_out or sample.texts
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in held_out)
    config = TokenizerConfig(vocab=max(vocabs))
    counter = WordCounter(new_tokenizer(config))
    for text in sample.texts:
        counter.add(text)
    tokenizer = train_vocabulary(counter.counts(), config)
    found = {}
    for vocab in sorted(vocabs):
        smaller = _shortened(tokenizer, config, vocab)
        ids = sum(len(encoding.ids) for encoding in smaller.encode_batch_fast(held_out, add_special_tokens=False))
        found[vocab] = size / max(1, ids + len(held_out))  # and an end token for each document
        if smaller.get_vocab_size() < vocab:
            break  # the sample has no more merges
    return found


def _shortened(tokenizer: Tokenizer, config: TokenizerConfig, vocab: int) -> Tokenizer:
    state = json.loads(tokenizer.to_str())["model"]
    known = {token: number for token, number in state["vocab"].items() if number < vocab}
    merges = [tuple(pair) for pair in state["merges"] if "".join(pair) in known]
    return new_tokenizer(config, models.BPE(known, merges))


def _scripts(texts: Sequence[str]) -> dict[str, float]:
    """Unicode names begin with the script: HANGUL SYLLABLE GA, LATIN SMALL LETTER A."""
    counts: Counter[str] = Counter()
    letters = Counter("".join(text[:2000] for text in texts[:500]))
    for letter, count in letters.items():
        if letter.isalpha():
            counts[unicodedata.name(letter, "OTHER").partition(" ")[0].capitalize()] += count
    total = max(1, sum(counts.values()))
    return {script: count / total for script, count in counts.most_common(4)}
