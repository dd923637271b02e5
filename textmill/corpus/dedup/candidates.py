"""Documents that agree in a band: found by sorting one band at a time, a part of it where memory is short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.corpus.dedup.clusters import count_partitions
from textmill.corpus.dedup.shingles import Hashes
from textmill.storage.files import write_bytes, writing

BUCKET_LINKS = 8
"""In a bucket of more than twice so many, a document is held only against the first ones and those right before it."""
MAX_TASK_HASHES = 1 << 20
"""Hashes, over all bands, that one process sorts without cutting them up."""
SORT_BYTES_PER_DOCUMENT = 96
"""Bytes that a document takes while a band is sorted."""
MERGE_PAIRS = 1 << 20
"""Pairs that are merged at a time, about."""


@dataclass(frozen=True)
class BandTask:
    """Some bands over all documents, or a part of them: the documents whose hash leaves `part` when divided by `parts`."""

    folder: Path
    counts: tuple[int, ...]
    """Documents of each piece."""
    first: int
    stop: int
    partition: int
    partitions: int

    def __repr__(self) -> str:
        return f"bands {self.first} to {self.stop - 1}, part {self.partition} of {self.partitions}"

    @property
    def size(self) -> int:
        """Hashes that are looked at."""
        return sum(self.counts) * (self.stop - self.first)

    @property
    def path(self) -> Path:
        """Where the pairs stand, sorted."""
        return self.folder / f"band-{self.first:03d}-{self.stop:03d}.{self.partition}of{self.partitions}.pairs"


def plan_band_tasks(folder: Path, counts: Sequence[int], bands: int, memory: int) -> list[BandTask]:
    """The work of finding all pairs, so cut that each part fits into `memory`; few documents are searched for several bands at a time."""
    partitions = count_partitions(sum(counts), SORT_BYTES_PER_DOCUMENT, memory)
    bands_per_task = max(MAX_TASK_HASHES // max(sum(counts), 1), 1)
    firsts = range(0, bands, bands_per_task)
    return [
        BandTask(folder, tuple(counts), first, min(first + bands_per_task, bands), partition, partitions)
        for first in firsts
        for partition in range(partitions)
    ]


def find_candidate_pairs(bands: BandTask) -> int:
    """Write the pairs of documents that agree in one of these bands; how many there are."""
    if not bands.path.is_file():
        found = [_pairs_in_buckets(*_read_band(bands, band)) for band in range(bands.first, bands.stop)]
        write_bytes(bands.path, [np.unique(np.concatenate(found)).tobytes()])
    return bands.path.stat().st_size // 8


def band_hashes_path(folder: Path, chunk: int) -> Path:
    """The band hashes of a piece's documents, band after band."""
    return folder / f"{chunk:05d}.bands"


def _read_band(bands: BandTask, band: int) -> tuple[Hashes, NDArray[np.uint64]]:
    hashes, numbers, start = [], [], 0
    for chunk, count in enumerate(bands.counts):
        band_values = np.fromfile(band_hashes_path(bands.folder, chunk), np.uint64, count, offset=band * count * 8)
        selected = np.flatnonzero(band_values % np.uint64(bands.partitions) == bands.partition)
        hashes.append(band_values[selected])
        numbers.append((selected + start).astype(np.uint64))
        start += count
    return np.concatenate(hashes), np.concatenate(numbers)


def _pairs_in_buckets(hashes: Hashes, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Pairs within each bucket as (first << 32 | second), first < second, sorted: all of a small bucket, links of a large one."""
    order = np.argsort(hashes, kind="stable")
    hashes, numbers = hashes[order], numbers[order]
    starts = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1])[: len(hashes)])
    sizes = np.diff(np.append(starts, len(hashes)))
    sizes, starts = sizes[sizes > 1], starts[sizes > 1]
    members = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
    firsts = np.repeat(starts, sizes)
    found = [np.zeros(0, np.uint64)]
    for step in range(BUCKET_LINKS):
        for others in (firsts + step, members - 1 - step):
            is_valid = (others >= firsts) & (others < members)
            found.append(numbers[others[is_valid]] << np.uint64(32) | numbers[members[is_valid]])
    return np.unique(np.concatenate(found))


def merge_pairs(bands: list[BandTask], path: Path, marks_path: Path) -> int:
    """One sorted file of all different pairs, and a file with a byte for each document that is 1 where it is in a pair."""
    if path.is_file() and marks_path.is_file():
        return path.stat().st_size // 8
    is_in_pair = np.zeros(sum(bands[0].counts), dtype=np.uint8)
    with writing(path) as stream:
        for pairs in _merge_sorted(bands):
            stream.write(pairs.tobytes())
            is_in_pair[(pairs >> np.uint64(32)).astype(np.int64)] = 1
            is_in_pair[(pairs & np.uint64(2**32 - 1)).astype(np.int64)] = 1
    write_bytes(marks_path, [is_in_pair.tobytes()])
    return path.stat().st_size // 8


def _merge_sorted(bands: list[BandTask]) -> Iterator[NDArray[np.uint64]]:
    """All pairs in order, each once: whatever is not above the least of the blocks' last ones is whole."""
    remaining = {band.path: band.path.stat().st_size // 8 for band in bands if band.path.stat().st_size}
    blocks = {path: np.zeros(0, np.uint64) for path in remaining}
    pairs_per_read = max(MERGE_PAIRS // max(len(remaining), 1), 1)
    while blocks:
        for path in list(blocks):
            if not len(blocks[path]):
                size = path.stat().st_size // 8
                blocks[path] = np.fromfile(path, np.uint64, pairs_per_read, offset=(size - remaining[path]) * 8)
                remaining[path] -= len(blocks[path])
                if not len(blocks[path]):
                    del blocks[path]
        if not blocks:
            return
        limit = min(block[-1] for block in blocks.values())
        ready = []
        for path, block in blocks.items():
            cut = int(np.searchsorted(block, limit, side="right"))
            ready.append(block[:cut])
            blocks[path] = block[cut:]
        yield np.unique(np.concatenate(ready))
