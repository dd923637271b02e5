"""Text for a tokenizer, read on the runner: words counted part by part, the sample chosen by a hash, and texts for the report."""

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
from textmill.config.renamed import original_settings
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
from textmill.tokens.vocabulary.algorithms import WordCounter, new_inner

PICKED_PARTS, PICKED_TEXTS, PICKED_CHARACTERS = 16, 1000, 2000
"""The report looks at so many parts of the text at most, so many documents in all, and the beginning of each document."""


@dataclass(frozen=True)
class Group:
    """A row group of a shard of the prepared corpus."""

    shard: Path
    number: int
    size: int

    def texts(self) -> Iterator[str]:
        """Its documents' texts."""
        with open_shard(self.shard) as shard:
            yield from shard.read_row_group(self.number, columns=["text"], use_threads=False).column(0).to_pylist()


@dataclass(frozen=True)
class Raw:
    """A piece of a source, read and cleaned as `prepare` would."""

    piece: SourceChunk
    config: CorpusConfig

    @property
    def size(self) -> int:
        """Bytes of input."""
        return self.piece.stop - self.piece.start

    def texts(self) -> Iterator[str]:
        """The texts of its records; what cannot be read is passed over: `prepare` accounts for it."""
        cleaner, into_lines = Cleaner(self.config), SENTENCE_SPLITTERS.get(self.config.sentences)
        for record in read_records(self.piece, self.config):
            text = None if isinstance(record, BadRecord) else cleaner.clean(record.text, record.url)
            if text is not None:
                yield into_lines(text) if into_lines else text


Part = Group | Raw


def parts_of(config: RunConfig, split: Split = "train") -> list[Part]:
    """The text that a tokenizer is fitted on, cut into parts that do not depend on who reads them."""
    if config.tokenizer.fit_on == "sources":
        check_packages(config.corpus)
        return [Raw(piece, config.corpus) for piece in split_into_chunks(_sources(config), config.corpus.documents)]
    groups: list[Part] = []
    for path in list_shards(config.folder_of("corpus"), split):
        with open_shard(path) as shard:
            metadata = shard.metadata
            groups += [
                Group(path, number, metadata.row_group(number).total_byte_size)
                for number in range(metadata.num_row_groups)
            ]
    return groups


def mark_of(config: RunConfig) -> dict[str, str]:
    """What tells that the text is the same as before."""
    if config.tokenizer.fit_on == "corpus":
        return {"corpus": open_manifest(config.folder_of("corpus"))["fingerprint"]}
    sources = _sources(config)
    states = [
        (name, source_state(source).fingerprint or hash_file(source.path))
        for name, source in zip(portable_names(sources), sources, strict=True)
    ]
    settings = original_settings(config.results("corpus"))  # a hash of before the renaming stays valid
    del settings["corpus.sources"]
    return {"sources": hash_json([sorted(states), {key: str(value) for key, value in settings.items()}])}


def _sources(config: RunConfig) -> list[Source]:
    folders = [config.folder_of(stage) for stage in STAGE_FOLDERS]
    own = folders + [folder.with_name(folder.name + ".part") for folder in folders]
    return find_sources(config.corpus.sources, skip=own, corpora=config.corpus.corpora_file)


def count_words(parts: Sequence[Part], config: RunConfig) -> Iterator[Counter[str]]:
    """The words of each part and how often they stand in the sample, counted on the runner."""
    limit = _limit(parts, config)
    yield from _mapped(
        partial(count_part, config=config.tokenizer, limit=limit), parts, config, "fit-tokenizer: read and count"
    )


def _limit(parts: Sequence[Part], config: RunConfig) -> int:
    """The hash below which a document is in the sample; for a number of documents they are all looked at first."""
    sample = config.tokenizer.fit_sample
    if sample <= 1:
        return int(sample * 2**64)
    marks = np.concatenate(
        [np.zeros(0, np.uint64), *_mapped(hash_part, parts, config, "fit-tokenizer: choose the sample")]
    )
    wanted = int(sample)
    return int(np.partition(marks, wanted - 1)[wanted - 1]) + 1 if wanted < len(marks) else 2**64


def _mapped(
    function: Callable[[Part], Result], parts: Sequence[Part], config: RunConfig, name: str
) -> Iterator[Result]:
    with progress(name, total=sum(part.size for part in parts), unit="bytes") as bar:
        for part, result in zip(parts, open_runner(config.runner).map(function, parts), strict=True):
            yield result
            bar.advance(part.size)


def hash_part(part: Part) -> NDArray[np.uint64]:
    """The hashes of a part's documents."""
    return np.array([hash_of(text) for text in part.texts()], np.uint64)


def count_part(part: Part, config: TokenizerConfig, limit: int) -> Counter[str]:
    """The words of those documents of a part that are in the sample."""
    counter = WordCounter(new_inner(config))
    for text in part.texts():
        if limit >= 2**64 or hash_of(text) < limit:
            counter.add(text)
    return counter.counts()


def hash_of(text: str) -> int:
    """64 bits of a text; they decide whether it is in a sample, and have nothing to do with those that decide its split."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"sample").digest())


def pick_texts(parts: Sequence[Part], config: RunConfig) -> list[str]:
    """A few texts from all over the parts, for a report."""
    count = min(len(parts), PICKED_PARTS)
    spread = [parts[number * len(parts) // count] for number in range(count)]
    pick = partial(pick_from, count=PICKED_TEXTS // count)
    return list(itertools.chain.from_iterable(open_runner(config.runner).map(pick, spread)))


def pick_from(part: Part, count: int) -> list[str]:
    """So many texts of a part, chosen by their hashes."""
    return [text[:PICKED_CHARACTERS] for text in heapq.nsmallest(count, part.texts(), key=hash_of)]
