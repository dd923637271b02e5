"""The evaluation data of `corpus.decontaminate`: its files, read once and kept as an index of n-grams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np

from textmill.config import CorpusConfig
from textmill.corpus.decontamination.ngrams import NgramIndex, Numbers, text_keys
from textmill.corpus.records import BadRecord, read_records
from textmill.corpus.sources import find_sources, split_into_chunks
from textmill.errors import TextmillError
from textmill.storage.files import hash_file, write_bytes

KEYS, LENGTHS = "ngrams.keys", "ngrams.lengths"
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
    for chunk in split_into_chunks(find_sources([str(path)]), config.documents):
        for record in read_records(chunk, config):
            if isinstance(record, BadRecord):
                raise TextmillError(f"corpus.decontaminate: {record}; repair the file, or name TASK:FILE")
            yield [record.text]


def describe_data(data: Sequence[EvaluationData]) -> list[dict[str, str]]:
    """Name, checksum and kind of each file, for the manifest: other data is another corpus."""
    names = names_of(data)
    return [
        {"file": name, "sha256": hash_file(one.path), "kind": one.kind} for name, one in zip(names, data, strict=True)
    ]


def names_of(data: Sequence[EvaluationData]) -> list[str]:
    """The file names; equal ones are numbered."""
    names = [one.name for one in data]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: number + 1].count(name)})"
        for number, name in enumerate(names)
    ]


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


def write_index(data: Sequence[EvaluationData], config: CorpusConfig, folder: Path) -> IndexFacts:
    """Read all evaluation data and write its n-grams, for the workers to open."""
    keys, lengths, owners = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint8)], [np.zeros(0, np.int64)]
    n, least = config.decontaminate_words, config.decontaminate_min_words
    counts = [0]
    for one in data:
        examples = size = 0
        stream = iter(one.read())
        while block := list(islice(stream, BLOCK)):
            texts = [(number, text) for number, texts in enumerate(block, examples) for text in dict.fromkeys(texts)]
            numbers = np.array([number for number, _ in texts], np.int64) + sum(counts)
            for length, found, places in text_keys([text for _, text in texts], n, least):
                keys.append(found)
                lengths.append(np.full(len(found), length, np.uint8))
                owners.append(numbers[places])
                size += len(found)
            examples += len(block)
        if not size:
            raise TextmillError(
                f"corpus.decontaminate: {one.path}: no text has {least} words or more, so none can be recognised; "
                "remove it, or lower corpus.decontaminate_min_words"
            )
        counts.append(examples)
    distinct, places, numbers = np.unique(np.concatenate(keys), return_index=True, return_inverse=True)
    write_bytes(folder / KEYS, [distinct.tobytes()])
    write_bytes(folder / LENGTHS, [np.concatenate(lengths)[places].tobytes()])
    every = np.concatenate(owners)
    recognised = np.histogram(np.unique(every), np.cumsum(counts))[0]
    too_short = [count - int(long) for count, long in zip(counts[1:], recognised, strict=True)]
    pairs = np.unique(np.stack([numbers, every], axis=1), axis=0)
    return IndexFacts(counts[1:], too_short, len(distinct), pairs)


def open_index(folder: Path) -> NgramIndex:
    """The index that `write_index` wrote; a worker keeps it for its next chunk."""
    return _open_index(folder, (folder / LENGTHS).stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _open_index(folder: Path, _written: int) -> NgramIndex:
    return NgramIndex(np.fromfile(folder / KEYS, np.uint64), np.fromfile(folder / LENGTHS, np.uint8))
