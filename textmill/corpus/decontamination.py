"""Decontamination: find documents that share long n-grams of words with evaluation data.

1. write_index          hash all n-grams of the evaluation data into a sorted index of keys
2. find_hits            find these keys in each cleaned document, in pass 1 of prepare: pairs of a document and a key
3. drop_contaminated    drop or mark documents with hits, except those of common phrases

A word is a run of letters, digits and underscores in lower case, as in Megatron-LM; in scripts without spaces (kana,
Han) it is one character. A key is the hash of an n-gram. With n = 3, "The mill stands still." has the keys of "the mill
stands" and "mill stands still"; a text of fewer than n words is one key, if it has enough words to be recognised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from textmill.config import CorpusConfig
from textmill.corpus.chunk_task import CONTAMINATED, DROPPED, ChunkTask
from textmill.corpus.clean.filters import codes_of, find_runs, unspaced_ranges
from textmill.corpus.dedup.decisions import Decisions
from textmill.corpus.dedup.minhash import BASE
from textmill.corpus.dedup.near_duplicates import text_blocks
from textmill.corpus.find_sources import find_sources, read_records, split_into_chunks
from textmill.corpus.records import BadRecord
from textmill.errors import TextmillError
from textmill.storage.files import atomic_writer, hash_file, write_bytes

Hashes = NDArray[np.uint64]
Numbers = NDArray[np.int64]
KEYS = "ngrams.keys"
LENGTHS = "ngrams.lengths"
NGRAM_WORDS = 13
"""Words in a row that a document and evaluation data must not share, as in Megatron-LM."""
MIN_WORDS = 8
"""An evaluation text of fewer words than an n-gram is one n-gram if it has at least this many, as in Megatron-LM."""
COMMON_DOCUMENTS = 10
"""An n-gram in this many documents or more is a common phrase and does not count, as in Megatron-LM."""
BLOCK = 1000
"""Examples that are read at a time."""
MIN_BITS = 16
MAX_BITS = 27
SPARSE_BITS = 5
"""A table of `NgramIndex` has 2 to the power of so many bytes: so many bits more than the number of its keys."""
_LETTER = 1
_OWN_WORD = 2


@dataclass(frozen=True)
class EvaluationData:
    """One entry of `corpus.decontaminate`."""

    path: Path
    read: Callable[[], Iterable[Sequence[str]]]
    """The texts of each example."""
    kind: str = "text"
    """How the file is read: the task, with a hash of its settings."""
    sha256: str = ""
    """The checksum of the data, if it is more than one file."""

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
        {"file": name, "sha256": entry.sha256 or hash_file(entry.path), "kind": entry.kind}
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


class EntryNgrams(NamedTuple):
    """The n-grams of one entry: an item for each n-gram of each text."""

    keys: NDArray[Any]
    """The hash of each, or its number in the index."""
    lengths: NDArray[np.uint8]
    """In words."""
    examples: Numbers
    """The number of the example."""
    example_count: int


def write_index(data: Sequence[EvaluationData], folder: Path) -> list[EntryNgrams]:
    """Read all evaluation data, and write its n-grams for the workers; return those of each entry, by number."""
    entries = [_read_ngrams(one) for one in data]
    lengths = np.concatenate([entry.lengths for entry in entries])
    distinct, places = np.unique(np.concatenate([entry.keys for entry in entries]), return_index=True)
    write_bytes(folder / KEYS, [distinct.tobytes()])
    write_bytes(folder / LENGTHS, [lengths[places].tobytes()])
    return [entry._replace(keys=np.searchsorted(distinct, entry.keys)) for entry in entries]


def _read_ngrams(entry: EvaluationData) -> EntryNgrams:
    """Read one entry, block by block."""
    keys = [np.zeros(0, np.uint64)]
    lengths = [np.zeros(0, np.uint8)]
    examples = [np.zeros(0, np.int64)]
    example_count = 0
    stream = iter(entry.read())
    while block := list(islice(stream, BLOCK)):
        texts: list[str] = []
        example_of_text: list[int] = []
        for number, example_texts in enumerate(block, example_count):
            different = list(dict.fromkeys(example_texts))
            texts += different
            example_of_text += [number] * len(different)
        example_count += len(block)
        for length, text_hashes, text_numbers in text_keys(texts, NGRAM_WORDS, MIN_WORDS):
            keys.append(text_hashes)
            lengths.append(np.full(len(text_hashes), length, np.uint8))
            examples.append(np.array(example_of_text, np.int64)[text_numbers])
    if not any(map(len, keys)):
        raise TextmillError(
            f"corpus.decontaminate: {entry.path}: no text has {MIN_WORDS} words or more, so none can be "
            "recognised; remove it"
        )
    return EntryNgrams(np.concatenate(keys), np.concatenate(lengths), np.concatenate(examples), example_count)


def find_hits(task: ChunkTask) -> None:
    """Write the n-grams of evaluation data in the cleaned documents of a chunk: the row of each and the n-gram."""
    index = open_index(task.folder / "work")
    with atomic_writer(task.path("hits")) as stream:
        for first_row, table in task.read_cleaned(["text"]):
            rows, keys = index.find(table.column(0).to_pylist())
            stream.write(np.stack([rows + first_row, keys], axis=1).tobytes())


def open_index(folder: Path) -> NgramIndex:
    """The index that `write_index` wrote; a worker keeps it for its next chunk."""
    return _open_index(folder, (folder / LENGTHS).stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _open_index(folder: Path, _written: int) -> NgramIndex:
    return NgramIndex(np.fromfile(folder / KEYS, np.uint64), np.fromfile(folder / LENGTHS, np.uint8))


def drop_contaminated(
    tasks: Sequence[ChunkTask], decisions: Decisions, data: Sequence[EvaluationData], entries: Sequence[EntryNgrams]
) -> dict[str, Any]:
    """Drop contaminated documents from those that are kept so far.

    Returns for each file of evaluation data how many of its examples were found, and in how many documents. An n-gram
    in COMMON_DOCUMENTS documents or more is a common phrase and does not count.
    """
    key_count = 1 + max(int(entry.keys.max()) for entry in entries)
    is_in_entry = [np.bincount(entry.keys, minlength=key_count) > 0 for entry in entries]
    occurrences = np.zeros(key_count, np.int64)  # of each key, in documents that are kept so far
    for task, split in zip(tasks, decisions.splits, strict=True):
        rows, keys = _read_hits(task)
        occurrences += np.bincount(keys[split[rows] >= 0], minlength=key_count)
    is_rare = occurrences < COMMON_DOCUMENTS
    documents = [0] * len(entries)
    for task, split in zip(tasks, decisions.splits, strict=True):
        rows, keys = _read_hits(task)
        is_hit = (split[rows] >= 0) & is_rare[keys]
        rows, keys = rows[is_hit], keys[is_hit]
        for number, has_key in enumerate(is_in_entry):
            documents[number] += len(np.unique(rows[has_key[keys]]))
        split[rows] = DROPPED[CONTAMINATED]
    is_found = is_rare & (occurrences > 0)
    return {
        name: {
            "examples": entry.example_count,
            "too_short": entry.example_count - len(np.unique(entry.examples)),
            "found": len(np.unique(entry.examples[is_found[entry.keys]])),
            "documents": found_in,
        }
        for name, entry, found_in in zip(names_of(data), entries, documents, strict=True)
    }


def _read_hits(task: ChunkTask) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows and the keys of the hits of a chunk."""
    pairs = np.fromfile(task.path("hits"), np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def text_keys(texts: Sequence[str], n: int, least: int) -> Iterator[tuple[int, Hashes, Numbers]]:
    """The keys of evaluation texts by their length in words, with the number of the text of each: all n-grams; a text
    of fewer words, but at least `least`, is one key."""
    hashes, counts = word_hashes(texts)
    text_of_word = np.repeat(np.arange(len(counts)), counts)
    for length, windows in windows_of(hashes, range(min(least, n), n + 1)):
        text_of_window = text_of_word[: len(windows)]
        is_key = text_of_window == text_of_word[length - 1 :]  # the window ends in the text in which it begins
        if length < n:
            is_key &= counts[text_of_window] == length
        yield length, windows[is_key], text_of_window[is_key]


@dataclass(frozen=True)
class NgramIndex:
    """The keys of evaluation data, sorted, and the length of each in words."""

    keys: Hashes
    lengths: NDArray[np.uint8]

    @cached_property
    def _tables(self) -> dict[int, tuple[int, NDArray[np.bool_]]]:
        """By length: a number of bits, and whether any key starts with these bits; so most n-grams need no search."""
        tables = {}
        for length in np.unique(self.lengths).tolist():
            keys = self.keys[self.lengths == length]
            shift = 64 - min(MAX_BITS, max(MIN_BITS, len(keys).bit_length() + SPARSE_BITS))
            table = np.zeros(1 << (64 - shift), np.bool_)
            table[(keys >> np.uint64(shift)).view(np.int64)] = True
            tables[length] = shift, table
        return tables

    def find(self, texts: Sequence[str]) -> tuple[Numbers, Numbers]:
        """The pairs of a text and a key that it contains, without repeats: numbers of texts, numbers of keys."""
        blocks = [np.zeros((0, 2), np.int64)]
        first_text = 0
        for group in text_blocks(texts):
            hashes, counts = word_hashes(group)
            text_ends = np.cumsum(counts)
            for length, windows in windows_of(hashes, list(self._tables)):
                shift, table = self._tables[length]
                starts = np.flatnonzero(table[(windows >> np.uint64(shift)).view(np.int64)])  # of possible hits
                keys = np.minimum(np.searchsorted(self.keys, windows[starts]), len(self.keys) - 1)
                text_numbers = np.searchsorted(text_ends, starts, "right")
                is_inside_text = starts + length <= text_ends[text_numbers]
                is_hit = (self.keys[keys] == windows[starts]) & is_inside_text
                blocks.append(np.stack([text_numbers[is_hit] + first_text, keys[is_hit]], axis=1))
            first_text += len(group)
        pairs = np.unique(np.concatenate(blocks), axis=0)
        return pairs[:, 0], pairs[:, 1]


def windows_of(hashes: Hashes, lengths: Sequence[int]) -> Iterator[tuple[int, Hashes]]:
    """For each length, in ascending order: a hash of every run of so many words, also across the ends of texts."""
    windows = hashes
    for length in range(1, min(max(lengths, default=0), len(hashes)) + 1):
        if length > 1:  # one word more
            windows = windows[:-1] * BASE + hashes[length - 1 :]
        if length in lengths:
            yield length, windows


def word_hashes(texts: Sequence[str]) -> tuple[Hashes, Numbers]:
    """A hash of each word of all texts, in order, and the number of words of each text."""
    lowered = [text.lower() for text in texts]
    codes = codes_of("\n".join(lowered))
    kinds = _character_kinds()[codes]
    words = find_runs(codes, kinds != 0, kinds == _OWN_WORD)
    bounds = np.cumsum([0, *(len(text) + 1 for text in lowered)])
    return words.hashes(), np.diff(np.searchsorted(words.starts, bounds))


@cache
def _character_kinds() -> NDArray[np.uint8]:
    """A table from code point to kind: a letter or digit, a word of its own, or other."""
    kinds = np.fromiter((chr(code).isalnum() for code in range(sys.maxunicode + 1)), np.uint8, sys.maxunicode + 1)
    kinds[ord("_")] = _LETTER
    for first, last in unspaced_ranges():
        kinds[first : last + 1] *= _OWN_WORD
    return kinds
