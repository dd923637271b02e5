"""Find near-duplicates: MinHash sketches, candidate pairs that share an LSH band, and their true Jaccard similarity.

Candidates are found by sorting one band at a time. If the documents 0 to 4 have the hashes 7 3 7 9 7 in a band, sorting
by hash gives the bucket [0, 2, 4] and its pairs (0, 2), (0, 4), (2, 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from textmill.config import CorpusConfig
from textmill.corpus.chunk_task import ChunkTask, chunk_file
from textmill.corpus.dedup.minhash import (
    SEGMENT_CHARACTERS,
    Hashes,
    Unit,
    band_hashes,
    choose_bands,
    distinct,
    jaccard,
    shingle,
    shingle_set,
)
from textmill.ranges import expand_ranges
from textmill.storage.files import atomic_writer, write_bytes
from textmill.storage.progress import progress

SHINGLE_SIZE = 5
"""Characters or words in a shingle."""
BLOCK_CHARACTERS = 1 << 17
BLOCK_DOCUMENTS = 1 << 10
"""The size of a block that is sketched at once: fits the processor's cache, large enough for numpy."""
BUCKET_LINKS = 8
"""In a bucket of more than twice this size, a document is paired only with the first ones and those just before it."""
PAIR_BYTES = 8
"""A pair in a file: the numbers of its documents as first << 32 | second."""
PAIRS_PER_TASK = 1 << 15
"""Candidate pairs per task. Within a task, pairs whose documents are already in one cluster are skipped."""
OPEN_CHUNKS = 64
"""Chunks whose shingle sets a process keeps open."""
PAIR_DTYPE = np.dtype([("first", "<u4"), ("second", "<u4"), ("jaccard", "<f8")])


def sketch_chunk(task: ChunkTask) -> int:
    """Write the band hashes and text lengths of a chunk's documents, without exact duplicates; return their number."""
    keep = np.fromfile(task.path("exact"), dtype=np.bool_)
    count = int(keep.sum())
    if task.path("lengths").is_file():
        return count
    bands, rows = choose_bands(task.config.dedup_threshold)
    documents_done = 0
    # The lengths file is written last; its presence means that both files are complete.
    with atomic_writer(task.path("lengths")) as lengths, atomic_writer(task.path("bands")) as stream:
        for texts in text_blocks(_read_texts(task, keep)):
            hashes, counts = _shingles(texts, task.config.dedup_shingles)
            hashes_by_band = band_hashes(hashes, counts, bands, rows)
            for band in range(bands):
                stream.seek((band * count + documents_done) * 8)
                stream.write(np.ascontiguousarray(hashes_by_band[:, band]).tobytes())
            lengths.write(np.array([len(text) for text in texts], np.int64).tobytes())
            documents_done += len(texts)
    return count


def _shingles(texts: list[str], unit: Unit) -> tuple[Hashes, NDArray[np.int64]]:
    if len(texts) == 1 and len(texts[0]) > SEGMENT_CHARACTERS:
        hashes = shingle_set(texts[0], unit, SHINGLE_SIZE)
        return hashes, np.array([len(hashes)])
    return shingle(texts, unit, SHINGLE_SIZE)


def text_blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts in blocks whose arrays fit the processor's cache."""
    block: list[str] = []
    size = 0
    for text in texts:
        if block and (size + len(text) > BLOCK_CHARACTERS or len(block) == BLOCK_DOCUMENTS):
            yield block
            block = []
            size = 0
        block.append(text)
        size += len(text)
    if block:
        yield block


def _read_texts(task: ChunkTask, keep: NDArray[np.bool_]) -> Iterator[str]:
    """Yield the texts of the selected documents of a chunk."""
    for first_row, table in task.read_cleaned(["text"]):
        is_wanted = keep[first_row : first_row + table.num_rows]
        yield from table.column(0).filter(pa.array(is_wanted)).to_pylist()


def find_candidate_pairs(folder: Path, counts: Sequence[int], bands: int) -> NDArray[np.uint64]:
    """The sorted pairs of documents that agree in a band; also written to the file `pairs` and, with a byte for each
    document of a chunk, 1 if it is in a pair, to the `marks` of the chunk.

    `folder`: that of the corpus; `counts`: the documents of each chunk."""
    found = [np.zeros(0, np.uint64)]
    with progress("prepare: find candidates", total=bands, unit="bands") as bar:
        for band in range(bands):
            found.append(_pairs_in_buckets(_read_band(folder, counts, band)))
            bar.advance()
    pairs = np.unique(np.concatenate(found))
    is_in_pair = np.zeros(sum(counts), np.uint8)
    is_in_pair[(pairs >> np.uint64(32)).astype(np.int64)] = 1
    is_in_pair[(pairs & np.uint64(2**32 - 1)).astype(np.int64)] = 1
    write_bytes(folder / "work" / "pairs", [pairs.tobytes()])
    for chunk, marks in enumerate(np.split(is_in_pair, np.cumsum(counts)[:-1])):
        write_bytes(chunk_file(folder, chunk, "marks"), [marks.tobytes()])
    return pairs


def _read_band(folder: Path, counts: Sequence[int], band: int) -> Hashes:
    """The hashes of a band, in the order of the documents."""
    return np.concatenate(
        [
            np.fromfile(chunk_file(folder, chunk, "bands"), np.uint64, count, offset=band * count * 8)
            for chunk, count in enumerate(counts)
        ]
    )


def _pairs_in_buckets(hashes: Hashes) -> NDArray[np.uint64]:
    """The pairs in each bucket as first << 32 | second, sorted, with first < second.

    A small bucket gives all its pairs, a large one only BUCKET_LINKS links per document.
    """
    numbers = np.argsort(hashes, kind="stable").astype(np.uint64)
    hashes = hashes[numbers]
    # Equal hashes are neighbours now: a bucket is a start and a size, and must have two members.
    starts = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1])[: len(hashes)])
    sizes = np.diff(np.append(starts, len(hashes)))
    sizes, starts = sizes[sizes > 1], starts[sizes > 1]
    # Of every member of a bucket: its index, and that of the first member.
    members = expand_ranges(starts, sizes)
    firsts = np.repeat(starts, sizes)
    pairs = [np.zeros(0, np.uint64)]
    for step in range(BUCKET_LINKS):
        for partners in (firsts + step, members - 1 - step):
            is_valid = (partners >= firsts) & (partners < members)
            pairs.append(numbers[partners[is_valid]] << np.uint64(32) | numbers[members[is_valid]])
    return np.unique(np.concatenate(pairs))


def write_shingle_sets(task: ChunkTask) -> int:
    """Write the shingle sets of a chunk's documents that are in a candidate pair; return how many there are."""
    is_in_pair = np.fromfile(task.path("marks"), np.bool_)
    if not task.path("ends").is_file():
        is_wanted = np.fromfile(task.path("exact"), np.bool_)
        is_wanted[is_wanted] = is_in_pair
        sizes = np.zeros(len(is_in_pair), np.int64)
        blocks = text_blocks(_read_texts(task, is_wanted))
        sets = (shingles for texts in blocks for shingles in _shingle_sets(texts, task.config))
        with atomic_writer(task.path("sets")) as stream:
            for position, shingles in zip(np.flatnonzero(is_in_pair), sets, strict=True):
                stream.write(shingles.tobytes())
                sizes[position] = len(shingles)
        write_bytes(task.path("ends"), [np.cumsum(sizes).tobytes()])
    return int(is_in_pair.sum())


def _shingle_sets(texts: list[str], config: CorpusConfig) -> list[Hashes]:
    hashes, counts = _shingles(texts, config.dedup_shingles)
    return [distinct(document_hashes) for document_hashes in np.split(hashes, np.cumsum(counts)[:-1])]


@dataclass(frozen=True)
class ConfirmTask:
    """A range of the sorted file of candidate pairs."""

    folder: Path
    """That of the corpus."""
    counts: tuple[int, ...]
    number: int
    pairs: int
    threshold: float

    def __repr__(self) -> str:
        return f"candidate pairs from number {self.number * PAIRS_PER_TASK:,}"

    @property
    def size(self) -> int:
        """Pairs to check; used for the progress bar."""
        return min(PAIRS_PER_TASK, self.pairs - self.number * PAIRS_PER_TASK)

    @property
    def path(self) -> Path:
        """The file of the confirmed pairs."""
        return self.folder / "work" / f"confirmed-{self.number:05d}"


def confirm_pairs(task: ConfirmTask) -> int:
    """Write the pairs whose Jaccard similarity reaches the threshold.

    A pair is skipped if other pairs have already joined both documents into one cluster.
    """
    if not task.path.is_file():
        starts = np.cumsum([0, *task.counts[:-1]])
        open_sets = lru_cache(maxsize=OPEN_CHUNKS)(partial(_open_sets, task.folder))

        def shingles_of(number: int) -> Hashes:
            # Empty chunks share their start with the next one; searchsorted finds the last of them, which has it.
            chunk = int(np.searchsorted(starts, number, side="right")) - 1
            ends, sets = open_sets(chunk)
            position = number - int(starts[chunk])
            return sets[ends[position - 1] if position else 0 : ends[position]]

        clusters = Clusters()
        offset = task.number * PAIRS_PER_TASK * PAIR_BYTES
        pairs = np.fromfile(task.folder / "work" / "pairs", np.uint64, PAIRS_PER_TASK, offset=offset).tolist()
        confirmed = []
        for pair in pairs:
            first = pair >> 32
            second = pair & (2**32 - 1)
            if clusters.find(first) == clusters.find(second):
                continue
            sets = [shingles_of(first), shingles_of(second)]
            small, large = sorted(map(len, sets))
            if small / large < task.threshold:
                continue  # Jaccard similarity cannot exceed the ratio of the sizes
            similarity = jaccard(*sets)
            if similarity >= task.threshold:
                clusters.join(first, second)
                confirmed.append((first, second, similarity))
        write_bytes(task.path, [np.array(confirmed, PAIR_DTYPE).tobytes()])
    return task.path.stat().st_size // PAIR_DTYPE.itemsize


def _open_sets(folder: Path, chunk: int) -> tuple[NDArray[np.int64], Hashes]:
    """Where the shingle sets of a chunk end, and the sets."""
    ends = np.memmap(chunk_file(folder, chunk, "ends"), np.int64, "r")
    return ends, np.memmap(chunk_file(folder, chunk, "sets"), np.uint64, "r")


class Clusters:
    """Disjoint sets of numbers (union-find); the smallest member identifies a cluster."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def find(self, number: int) -> int:
        """The smallest member of the cluster of `number`."""
        parents = self._parents
        root = number
        while (parent := parents.get(root, root)) != root:
            root = parent
        while number != root:  # path compression
            parents[number], number = root, parents[number]
        return root

    def join(self, first: int, second: int) -> None:
        """Merge the clusters of two numbers."""
        first = self.find(first)
        second = self.find(second)
        smallest = min(first, second)
        self._parents[first] = self._parents[second] = smallest
