"""Find near-duplicates: MinHash sketches, candidate pairs that share an LSH band, and their true Jaccard similarity.

Candidates are found by sorting one band at a time. If the documents 0 to 4 have the hashes 7 3 7 9 7 in a band, sorting
by hash gives the bucket [0, 2, 4] and its pairs (0, 2), (0, 4), (2, 4). Each task writes the sorted pairs of some
bands; `merge_pairs` merges them into one sorted file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from textmill.config import CorpusConfig
from textmill.corpus.chunk_task import ChunkTask
from textmill.corpus.dedup.clusters import Clusters, count_partitions
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
from textmill.corpus.shards import open_shard
from textmill.ranges import expand_ranges
from textmill.storage.files import atomic_writer, write_bytes

SHINGLE_SIZE = 5
"""Characters or words in a shingle."""
BLOCK_CHARACTERS = 1 << 17
BLOCK_DOCUMENTS = 1 << 10
"""The size of a block that is sketched at once: fits the processor's cache, large enough for numpy."""
BUCKET_LINKS = 8
"""In a bucket of more than twice this size, a document is paired only with the first ones and those just before it."""
MAX_TASK_HASHES = 1 << 20
"""The most hashes that one task sorts; small corpora get several bands per task."""
SORT_BYTES_PER_DOCUMENT = 96
"""Memory per document while a band is sorted."""
MERGE_PAIRS = 1 << 20
"""Pairs merged at a time, approximately."""
PAIR_BYTES = 8
"""A pair in a file: the numbers of its documents as first << 32 | second."""
PAIRS_PER_TASK = 1 << 15
"""Candidate pairs per task. Within a task, pairs whose documents are already in one cluster are skipped."""
CACHE_BYTES = 32 << 20
"""Memory for shingle sets per process; pairs are sorted, and the operating system caches the files too."""
OPEN_CHUNKS = 16
"""Chunks whose set offsets a process keeps in memory."""
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
    with (
        atomic_writer(task.path("lengths")) as lengths,
        atomic_writer(band_hashes_path(task.folder / "work", task.number)) as stream,
    ):
        for texts in _text_blocks(_read_texts(task, keep)):
            hashes, counts = _shingles(texts, task.config.dedup_shingles)
            hashes_by_band = band_hashes(hashes, counts, bands, rows)
            for band in range(bands):
                stream.seek((band * count + documents_done) * 8)
                stream.write(np.ascontiguousarray(hashes_by_band[:, band]).tobytes())
            lengths.write(np.array([len(text) for text in texts], np.int64).tobytes())
            documents_done += len(texts)
    return count


def band_hashes_path(folder: Path, chunk: int) -> Path:
    """The file of a chunk's band hashes, band by band."""
    return folder / f"{chunk:05d}.bands"


def _shingles(texts: list[str], unit: Unit) -> tuple[Hashes, NDArray[np.int64]]:
    if len(texts) == 1 and len(texts[0]) > SEGMENT_CHARACTERS:
        hashes = shingle_set(texts[0], unit, SHINGLE_SIZE)
        return hashes, np.array([len(hashes)])
    return shingle(texts, unit, SHINGLE_SIZE)


def _text_blocks(texts: Iterator[str]) -> Iterator[list[str]]:
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
    documents_done = 0
    with open_shard(task.path("parquet")) as cleaned:
        for group in range(cleaned.num_row_groups):
            rows = cleaned.metadata.row_group(group).num_rows
            is_wanted = keep[documents_done : documents_done + rows]
            documents_done += rows
            if is_wanted.any():
                column = cleaned.read_row_group(group, columns=["text"], use_threads=False).column(0)
                yield from column.filter(pa.array(is_wanted)).to_pylist()


@dataclass(frozen=True)
class BandTask:
    """Bands first to stop-1 of all documents, or one partition: documents with hash % partitions == partition."""

    folder: Path
    counts: tuple[int, ...]
    """The number of documents in each chunk."""
    first: int
    stop: int
    partition: int
    partitions: int

    def __repr__(self) -> str:
        return f"bands {self.first} to {self.stop - 1}, partition {self.partition} of {self.partitions}"

    @property
    def size(self) -> int:
        """Hashes to process; used for the progress bar."""
        return sum(self.counts) * (self.stop - self.first)

    @property
    def path(self) -> Path:
        """The file of the sorted pairs."""
        return self.folder / f"band-{self.first:03d}-{self.stop:03d}.{self.partition}of{self.partitions}.pairs"


def plan_band_tasks(folder: Path, counts: Sequence[int], bands: int, memory: int) -> list[BandTask]:
    """Divide the search into tasks that each fit `memory`; few documents share one task for several bands."""
    partitions = count_partitions(sum(counts), SORT_BYTES_PER_DOCUMENT, memory)
    bands_per_task = max(MAX_TASK_HASHES // max(sum(counts), 1), 1)
    firsts = range(0, bands, bands_per_task)
    return [
        BandTask(folder, tuple(counts), first, min(first + bands_per_task, bands), partition, partitions)
        for first in firsts
        for partition in range(partitions)
    ]


def find_candidate_pairs(task: BandTask) -> int:
    """Write the pairs of documents that agree in one of these bands; return their number."""
    if not task.path.is_file():
        pairs = [_pairs_in_buckets(*_read_band(task, band)) for band in range(task.first, task.stop)]
        write_bytes(task.path, [np.unique(np.concatenate(pairs)).tobytes()])
    return _count_pairs(task.path)


def _read_band(task: BandTask, band: int) -> tuple[Hashes, NDArray[np.uint64]]:
    """The hashes of a band in the task's partition, and the numbers of their documents."""
    hashes = []
    numbers = []
    start = 0
    for chunk, count in enumerate(task.counts):
        band_values = np.fromfile(band_hashes_path(task.folder, chunk), np.uint64, count, offset=band * count * 8)
        selected = np.flatnonzero(band_values % np.uint64(task.partitions) == task.partition)
        hashes.append(band_values[selected])
        numbers.append((selected + start).astype(np.uint64))
        start += count
    return np.concatenate(hashes), np.concatenate(numbers)


def _pairs_in_buckets(hashes: Hashes, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The pairs in each bucket as first << 32 | second, sorted, with first < second.

    A small bucket gives all its pairs, a large one only BUCKET_LINKS links per document.
    """
    order = np.argsort(hashes, kind="stable")
    hashes = hashes[order]
    numbers = numbers[order]
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


def merge_pairs(tasks: list[BandTask], path: Path, marks_path: Path) -> int:
    """Merge all pairs into one sorted file; write a second file with one byte per document, 1 if it is in a pair."""
    if path.is_file() and marks_path.is_file():
        return _count_pairs(path)
    is_in_pair = np.zeros(sum(tasks[0].counts), dtype=np.uint8)
    with atomic_writer(path) as stream:
        for pairs in _merge_sorted(tasks):
            stream.write(pairs.tobytes())
            is_in_pair[(pairs >> np.uint64(32)).astype(np.int64)] = 1
            is_in_pair[(pairs & np.uint64(2**32 - 1)).astype(np.int64)] = 1
    write_bytes(marks_path, [is_in_pair.tobytes()])
    return _count_pairs(path)


def _merge_sorted(tasks: list[BandTask]) -> Iterator[NDArray[np.uint64]]:
    """Yield all pairs in order, each once.

    Values up to the smallest last value of all blocks are complete: no later block can hold one of them.
    """
    paths = [task.path for task in tasks if _count_pairs(task.path)]
    read = dict.fromkeys(paths, 0)  # how many pairs of each file have been read
    blocks = {path: np.zeros(0, np.uint64) for path in paths}
    pairs_per_read = max(MERGE_PAIRS // max(len(paths), 1), 1)
    while True:
        for path in [path for path, block in blocks.items() if not len(block)]:
            blocks[path] = np.fromfile(path, np.uint64, pairs_per_read, offset=read[path] * PAIR_BYTES)
            read[path] += len(blocks[path])
            if not len(blocks[path]):
                del blocks[path]
        if not blocks:
            return
        limit = min(block[-1] for block in blocks.values())
        complete = []
        for path, block in blocks.items():
            end = int(np.searchsorted(block, limit, side="right"))
            complete.append(block[:end])
            blocks[path] = block[end:]
        yield np.unique(np.concatenate(complete))


def _count_pairs(path: Path) -> int:
    return path.stat().st_size // PAIR_BYTES


@dataclass(frozen=True)
class ShingleTask:
    """A chunk and the number of its first document."""

    task: ChunkTask
    start: int

    def __repr__(self) -> str:
        return repr(self.task)

    @property
    def size(self) -> int:
        """Bytes of input; used for the progress bar."""
        return self.task.size


def write_shingle_sets(shingle_task: ShingleTask) -> int:
    """Write the shingle sets of a chunk's documents that are in a candidate pair; return how many there are."""
    task = shingle_task.task
    keep = np.fromfile(task.path("exact"), dtype=np.bool_)
    is_in_pair = np.fromfile(
        task.folder / "work" / "marks", dtype=np.bool_, count=int(keep.sum()), offset=shingle_task.start
    )
    if not task.path("ends").is_file():
        is_wanted = keep.copy()
        is_wanted[keep] = is_in_pair
        sizes = np.zeros(len(is_in_pair), np.int64)
        blocks = _text_blocks(_read_texts(task, is_wanted))
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
    counts: tuple[int, ...]
    number: int
    pairs: int
    threshold: float
    memory: int

    def __repr__(self) -> str:
        return f"candidate pairs from number {self.number * PAIRS_PER_TASK:,}"

    @property
    def size(self) -> int:
        """Pairs to check; used for the progress bar."""
        return min(PAIRS_PER_TASK, self.pairs - self.number * PAIRS_PER_TASK)

    @property
    def path(self) -> Path:
        """The file of the confirmed pairs."""
        return self.folder / f"confirmed-{self.number:05d}"


def confirm_pairs(task: ConfirmTask) -> int:
    """Write the pairs whose Jaccard similarity reaches the threshold.

    A pair is skipped if other pairs have already joined both documents into one cluster.
    """
    if not task.path.is_file():
        starts = np.cumsum([0, *task.counts[:-1]])
        sets = ShingleSetCache(task.folder, starts, task.memory)
        clusters = Clusters()
        offset = task.number * PAIRS_PER_TASK * PAIR_BYTES
        pairs = np.fromfile(task.folder / "pairs", np.uint64, PAIRS_PER_TASK, offset=offset).tolist()
        confirmed = []
        for pair in pairs:
            first = pair >> 32
            second = pair & (2**32 - 1)
            if clusters.find(first) == clusters.find(second):
                continue
            small, large = sorted((sets.count_shingles(first), sets.count_shingles(second)))
            if small / large < task.threshold:
                continue  # Jaccard similarity cannot exceed the ratio of the sizes
            similarity = jaccard(sets[first], sets[second])
            if similarity >= task.threshold:
                clusters.join(first, second)
                confirmed.append((first, second, similarity))
        write_bytes(task.path, [np.array(confirmed, PAIR_DTYPE).tobytes()])
    return task.path.stat().st_size // PAIR_DTYPE.itemsize


@dataclass
class ShingleSetCache:
    """Reads shingle sets by document number; caches the most recently used ones in limited memory."""

    folder: Path
    starts: NDArray[np.int64]
    memory: int
    cached: OrderedDict[int, Hashes] = field(default_factory=OrderedDict)
    cached_bytes: int = 0
    ends: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    """Where the sets of a chunk end, for the chunks used last."""

    def __getitem__(self, number: int) -> Hashes:
        if number in self.cached:
            self.cached.move_to_end(number)
            return self.cached[number]
        shingles = self._read(number)
        self.cached[number] = shingles
        self.cached_bytes += shingles.nbytes
        while self.cached_bytes > self.memory and len(self.cached) > 2:
            _, oldest = self.cached.popitem(last=False)
            self.cached_bytes -= oldest.nbytes
        return shingles

    def count_shingles(self, number: int) -> int:
        """The number of shingles of a document, without reading them."""
        _, start, end = self._set_range(number)
        return end - start

    def _set_range(self, number: int) -> tuple[int, int, int]:
        """The chunk of a document, and where its set starts and ends in the file of that chunk."""
        # Empty chunks share their start with the next one; searchsorted finds the last of them, which has the document.
        chunk = int(np.searchsorted(self.starts, number, side="right")) - 1
        position = number - int(self.starts[chunk])
        if chunk not in self.ends:
            if len(self.ends) == OPEN_CHUNKS:
                self.ends.pop(next(iter(self.ends)))
            self.ends[chunk] = np.fromfile(self.folder / f"{chunk:05d}.ends", np.int64)
        ends = self.ends[chunk]
        return chunk, int(ends[position - 1]) if position else 0, int(ends[position])

    def _read(self, number: int) -> Hashes:
        chunk, start, end = self._set_range(number)
        return np.fromfile(self.folder / f"{chunk:05d}.sets", np.uint64, end - start, offset=8 * start)
