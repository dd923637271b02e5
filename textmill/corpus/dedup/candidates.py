"""Find candidate pairs: documents that share an LSH band, found by sorting one band at a time.

If the documents 0 to 4 have the hashes 7 3 7 9 7 in a band, sorting by hash gives the bucket [0, 2, 4] and its pairs
(0, 2), (0, 4), (2, 4). Each task writes the sorted pairs of some bands; `merge_pairs` merges them into one sorted file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.corpus.dedup.clusters import count_partitions
from textmill.corpus.dedup.shingles import Hashes
from textmill.ranges import expand_ranges
from textmill.storage.files import atomic_writer, write_bytes

BUCKET_LINKS = 8
"""In a bucket of more than twice this size, a document is paired only with the first ones and those just before it."""
MAX_TASK_HASHES = 1 << 20
"""The most hashes that one task sorts; small corpora get several bands per task."""
SORT_BYTES_PER_DOCUMENT = 96
"""Memory per document while a band is sorted."""
PAIR_BYTES = 8
"""A pair in a file: the numbers of its documents as first << 32 | second."""
MERGE_PAIRS = 1 << 20
"""Pairs merged at a time, approximately."""


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


def band_hashes_path(folder: Path, chunk: int) -> Path:
    """The file of a chunk's band hashes, band by band."""
    return folder / f"{chunk:05d}.bands"


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


def _count_pairs(path: Path) -> int:
    return path.stat().st_size // PAIR_BYTES


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
