"""Reads the text for fitting a tokenizer on the runner: word counts of a sample, and texts for the report."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.config import STAGE_FOLDERS, CorpusConfig, RunConfig, TokenizerConfig
from textmill.corpus.clean import Cleaner
from textmill.corpus.clean.cleaner import check_packages
from textmill.corpus.document import Split
from textmill.corpus.passes import SENTENCE_SPLITTERS
from textmill.corpus.records import BadRecord, read_records
from textmill.corpus.shards import list_shards, open_shard
from textmill.corpus.source import Source, SourceChunk
from textmill.corpus.sources import find_sources, portable_names, source_state, split_into_chunks
from textmill.runners import Result, open_runner
from textmill.storage.files import hash_file, hash_json
from textmill.storage.progress import progress
from textmill.storage.stages import open_manifest
from textmill.tokens.vocabulary.algorithms import WordCounter, new_tokenizer
from textmill.tokens.vocabulary.text_pieces import cut_text

PICKED_PARTS = 16
PICKED_TEXTS = 1000
PICKED_CHARACTERS = 2000
"""The report reads at most this many parts of the text, documents in all, and characters of each document."""


@dataclass(frozen=True)
class CorpusPart:
    """A row group of a shard of the prepared corpus."""

    shard: Path
    number: int
    size: int

    def texts(self) -> Iterator[str]:
        """The texts of its documents."""
        with open_shard(self.shard) as shard:
            yield from shard.read_row_group(self.number, columns=["text"], use_threads=False).column(0).to_pylist()


@dataclass(frozen=True)
class SourcePart:
    """A chunk of a source, read and cleaned as `prepare` does it."""

    chunk: SourceChunk
    config: CorpusConfig

    @property
    def size(self) -> int:
        """Bytes of input."""
        return self.chunk.stop - self.chunk.start

    def texts(self) -> Iterator[str]:
        """The texts of its records; unreadable records are skipped, because `prepare` reports them."""
        cleaner = Cleaner(self.config)
        into_lines = SENTENCE_SPLITTERS.get(self.config.sentences)
        for record in read_records(self.chunk, self.config):
            text = None if isinstance(record, BadRecord) else cleaner.clean(record.text, record.url)
            if text is not None:
                yield into_lines(text) if into_lines else text


TextPart = CorpusPart | SourcePart


def find_text_parts(config: RunConfig, split: Split = "train") -> list[TextPart]:
    """The text that a tokenizer is fitted on, in parts that do not depend on the number of workers."""
    if config.tokenizer.fit_on == "sources":
        check_packages(config.corpus)
        return [
            SourcePart(chunk, config.corpus) for chunk in split_into_chunks(_sources(config), config.corpus.documents)
        ]
    parts: list[TextPart] = []
    for path in list_shards(config.folder_of("corpus"), split):
        with open_shard(path) as shard:
            metadata = shard.metadata
            parts += [
                CorpusPart(path, number, metadata.row_group(number).total_byte_size)
                for number in range(metadata.num_row_groups)
            ]
    return parts


def text_fingerprint(config: RunConfig) -> dict[str, str]:
    """Changes when the text or the settings for reading it change."""
    if config.tokenizer.fit_on == "corpus":
        return {"corpus": open_manifest(config.folder_of("corpus"), "prepare")["fingerprint"]}
    sources = _sources(config)
    states = [
        (name, source_state(source).fingerprint or hash_file(source.path))
        for name, source in zip(portable_names(sources), sources, strict=True)
    ]
    settings = config.results("corpus")
    del settings["corpus.sources"]
    return {"sources": hash_json([sorted(states), {key: str(value) for key, value in settings.items()}])}


def _sources(config: RunConfig) -> list[Source]:
    folders = [config.folder_of(stage) for stage in STAGE_FOLDERS]
    own = folders + [folder.with_name(folder.name + ".part") for folder in folders]
    return find_sources(
        config.corpus.sources, skip=own, corpora=config.corpus.corpora_file, encoding=config.corpus.encoding
    )


def count_words(parts: Sequence[TextPart], config: RunConfig) -> Iterator[Counter[str]]:
    """How often each word occurs in the sampled documents of each part, counted on the runner."""
    limit = _hash_limit(parts, config)
    yield from _map_parts(
        partial(count_part, config=config.tokenizer, limit=limit), parts, config, "fit-tokenizer: read and count"
    )


def _hash_limit(parts: Sequence[TextPart], config: RunConfig) -> int:
    """Documents, or pieces of long ones, with a hash below this limit are in the sample; a sample of N documents needs
    all hashes first."""
    sample = config.tokenizer.fit_sample
    if sample <= 1:
        return int(sample * 2**64)
    hashes = np.concatenate(
        [np.zeros(0, np.uint64), *_map_parts(hash_part, parts, config, "fit-tokenizer: choose the sample")]
    )
    count = int(sample)
    return int(np.partition(hashes, count - 1)[count - 1]) + 1 if count < len(hashes) else 2**64


def _map_parts(
    function: Callable[[TextPart], Result], parts: Sequence[TextPart], config: RunConfig, name: str
) -> Iterator[Result]:
    with progress(name, total=sum(part.size for part in parts), unit="bytes") as bar:
        for part, result in zip(parts, open_runner(config.runner).map(function, parts), strict=True):
            yield result
            bar.advance(part.size)


def hash_part(part: TextPart) -> NDArray[np.uint64]:
    """The hashes of the documents of a part, or of their pieces."""
    return np.array([hash_text(piece) for text in part.texts() for piece in cut_text(text)], np.uint64)


def count_part(part: TextPart, config: TokenizerConfig, limit: int) -> Counter[str]:
    """Count the words of the sampled documents of a part."""
    counter = WordCounter(new_tokenizer(config))
    for text in part.texts():
        for piece in [text] if limit >= 2**64 else cut_text(text):
            if limit >= 2**64 or hash_text(piece) < limit:
                counter.add(piece)
    return counter.counts()


def hash_text(text: str) -> int:
    """A 64-bit hash that decides whether a text is in the sample; independent of the hash that decides its split."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"sample").digest())


def pick_texts(parts: Sequence[TextPart], config: RunConfig) -> list[str]:
    """A few texts from evenly spaced parts, for the report."""
    count = min(len(parts), PICKED_PARTS)
    spread = [parts[number * len(parts) // count] for number in range(count)]
    pick = partial(pick_from, count=PICKED_TEXTS // count)
    return list(itertools.chain.from_iterable(open_runner(config.runner).map(pick, spread)))


def pick_from(part: TextPart, count: int) -> list[str]:
    """`count` texts of a part, selected by their hashes."""
    return [
        text
        for _, text in heapq.nsmallest(count, ((hash_text(text), text[:PICKED_CHARACTERS]) for text in part.texts()))
    ]
