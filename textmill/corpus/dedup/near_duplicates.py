"""Find near-duplicates: compute MinHash sketches, then confirm candidate pairs by their true Jaccard similarity."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from textmill.config import CorpusConfig
from textmill.corpus.dedup.candidates import PAIR_BYTES, band_hashes_path
from textmill.corpus.dedup.clusters import Clusters
from textmill.corpus.dedup.minhash import band_hashes, choose_bands
from textmill.corpus.dedup.shingles import SEGMENT_CHARACTERS, Hashes, Unit, distinct, jaccard, shingle, shingle_set
from textmill.corpus.passes import ChunkTask
from textmill.corpus.shards import open_shard
from textmill.storage.files import atomic_writer, write_bytes

BLOCK_CHARACTERS = 1 << 17
BLOCK_DOCUMENTS = 1 << 10
"""The size of a block that is sketched at once: fits the processor's cache, large enough for numpy."""
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
        atomic_writer(band_hashes_path(task.folder / "work", task.chunk.number)) as stream,
    ):
        for texts in _text_blocks(_read_texts(task, keep)):
            hashes, counts = _shingles(texts, task.config.dedup_shingles, task.config.dedup_shingle_size)
            hashes_by_band = band_hashes(hashes, counts, bands, rows)
            for band in range(bands):
                stream.seek((band * count + documents_done) * 8)
                stream.write(np.ascontiguousarray(hashes_by_band[:, band]).tobytes())
            lengths.write(np.array([len(text) for text in texts], np.int64).tobytes())
            documents_done += len(texts)
    return count


def _shingle_sets(texts: list[str], config: CorpusConfig) -> list[Hashes]:
    hashes, counts = _shingles(texts, config.dedup_shingles, config.dedup_shingle_size)
    return [distinct(document_hashes) for document_hashes in np.split(hashes, np.cumsum(counts)[:-1])]


def _shingles(texts: list[str], unit: Unit, n: int) -> tuple[Hashes, NDArray[np.int64]]:
    if len(texts) == 1 and len(texts[0]) > SEGMENT_CHARACTERS:
        hashes = shingle_set(texts[0], unit, n)
        return hashes, np.array([len(hashes)])
    return shingle(texts, unit, n)


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
