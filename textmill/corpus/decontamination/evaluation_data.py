"""The evaluation data of `corpus.decontaminate`: its files, read once and kept as an index of n-grams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from textmill.config import CorpusConfig
from textmill.corpus.decontamination.ngrams import NgramIndex, Numbers, text_keys
from textmill.corpus.records import BadRecord, read_records
from textmill.corpus.sources import find_sources, split_into_chunks
from textmill.errors import TextmillError
from textmill.storage.files import hash_file, write_bytes

KEYS = "ngrams.keys"
LENGTHS = "ngrams.lengths"
BLOCK = 1000
"""Examples that are read at a time."""


@dataclass(frozen=True)
class EvaluationData:
    """One entry of `corpus.decontaminate`."""

    path: Path
    read: Callable[[], Iterable[Sequence[str]]]
    """The texts of each example."""
    kind: str = "text"
    """How the file is read: the task, with a hash of its settings."""

    @property
    def name(self) -> str:
        """Its file name."""
        return self.path.name


OpenData = Callable[[str], EvaluationData]
"""From an entry of `corpus.decontaminate` to its data."""


def open_text_data(entry: str) -> EvaluationData:
    """A file that is read as a source of the corpus: each of its documents is an example."""
    path = Path(entry)
    if not path.is_file():
        raise TextmillError(f"corpus.decontaminate: {path}: no such file; name a file of text, or TASK:FILE")
    return EvaluationData(path, lambda: _read_documents(path))


def _read_documents(path: Path) -> Iterator[Sequence[str]]:
    config = CorpusConfig(documents="file")
    for chunk in split_into_chunks(find_sources([str(path)], setting="corpus.decontaminate"), config.documents):
        for record in read_records(chunk, config):
            if isinstance(record, BadRecord):
                raise TextmillError(f"corpus.decontaminate: {record}; repair the file, or name TASK:FILE")
            yield [record.text]


def describe_data(data: Sequence[EvaluationData]) -> list[dict[str, str]]:
    """Name, checksum and kind of each file, for the manifest: other data is another corpus."""
    names = names_of(data)
    return [
        {"file": name, "sha256": hash_file(entry.path), "kind": entry.kind}
        for name, entry in zip(names, data, strict=True)
    ]


def names_of(data: Sequence[EvaluationData]) -> list[str]:
    """The file names; equal ones are numbered: test.jsonl (1), test.jsonl (2)."""
    names = [entry.name for entry in data]
    numbered = []
    for place, name in enumerate(names):
        number = names[: place + 1].count(name)
        numbered.append(name if names.count(name) == 1 else f"{name} ({number})")
    return numbered


@dataclass(frozen=True)
class IndexFacts:
    """What the index was made of."""

    examples: list[int]
    """Examples of each entry."""
    too_short: list[int]
    """Those that are too short to be recognised."""
    keys: int
    """Distinct n-grams."""
    owners: Numbers
    """[pairs, 2]: an n-gram and an example that has it, numbered over all entries; sorted."""


class _EntryNgrams(NamedTuple):
    """The n-grams of one entry: an item for each n-gram of each text."""

    keys: NDArray[np.uint64]
    lengths: NDArray[np.uint8]
    """In words."""
    examples: Numbers
    """The number of the example, counted over all entries."""
    example_count: int


def write_index(data: Sequence[EvaluationData], config: CorpusConfig, folder: Path) -> IndexFacts:
    """Read all evaluation data and write its n-grams, for the workers to open."""
    entries: list[_EntryNgrams] = []
    for one in data:
        entries.append(_read_ngrams(one, config, sum(entry.example_count for entry in entries)))
    lengths = np.concatenate([entry.lengths for entry in entries])
    examples = np.concatenate([entry.examples for entry in entries])
    example_counts = [entry.example_count for entry in entries]
    distinct, places, key_numbers = np.unique(
        np.concatenate([entry.keys for entry in entries]), return_index=True, return_inverse=True
    )
    write_bytes(folder / KEYS, [distinct.tobytes()])
    write_bytes(folder / LENGTHS, [lengths[places].tobytes()])
    recognised = np.histogram(np.unique(examples), np.cumsum([0, *example_counts]))[0]
    too_short = [total - int(count) for total, count in zip(example_counts, recognised, strict=True)]
    owners = np.unique(np.stack([key_numbers, examples], axis=1), axis=0)
    return IndexFacts(example_counts, too_short, len(distinct), owners)


def _read_ngrams(entry: EvaluationData, config: CorpusConfig, first_example: int) -> _EntryNgrams:
    """Read one entry, block by block; its examples are numbered from `first_example` on."""
    n = config.decontaminate_words
    min_words = config.decontaminate_min_words
    keys = [np.zeros(0, np.uint64)]
    lengths = [np.zeros(0, np.uint8)]
    examples = [np.zeros(0, np.int64)]
    example_count = 0
    stream = iter(entry.read())
    while block := list(islice(stream, BLOCK)):
        texts: list[str] = []
        example_of_text: list[int] = []
        for number, example_texts in enumerate(block, first_example + example_count):
            different = list(dict.fromkeys(example_texts))
            texts += different
            example_of_text += [number] * len(different)
        example_count += len(block)
        for length, text_hashes, text_numbers in text_keys(texts, n, min_words):
            keys.append(text_hashes)
            lengths.append(np.full(len(text_hashes), length, np.uint8))
            examples.append(np.array(example_of_text, np.int64)[text_numbers])
    if not any(map(len, keys)):
        raise TextmillError(
            f"corpus.decontaminate: {entry.path}: no text has {min_words} words or more, so none can be "
            "recognised; remove it, or lower corpus.decontaminate_min_words"
        )
    return _EntryNgrams(np.concatenate(keys), np.concatenate(lengths), np.concatenate(examples), example_count)


def open_index(folder: Path) -> NgramIndex:
    """The index that `write_index` wrote; a worker keeps it for its next chunk."""
    return _open_index(folder, (folder / LENGTHS).stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _open_index(folder: Path, _written: int) -> NgramIndex:
    return NgramIndex(np.fromfile(folder / KEYS, np.uint64), np.fromfile(folder / LENGTHS, np.uint8))
