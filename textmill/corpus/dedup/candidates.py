"""Documents that agree in a band: found by sorting one band at a time, a part of it where memory is short."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.corpus.dedup.clusters import parts_of
from textmill.corpus.dedup.shingles import Hashes
from textmill.storage.files import write_bytes, writing

LINKS = 8
"""In a bucket of more than twice so many, a document is held only against the first ones and those right before it."""
TOGETHER = 1 << 20
"""Hashes, over all bands, that one process sorts without cutting them up."""
ROW = 96
"""Bytes that a document takes while a band is sorted."""
BLOCK = 1 << 20
"""Pairs that are merged at a time, about."""


@dataclass(frozen=True)
class Bands:
    """Some bands over all documents, or a part of them: the documents whose hash leaves `part` when divided by `parts`."""

    folder: Path
    counts: tuple[int, ...]
    """Documents of each piece."""
    first: int
    stop: int
    part: int
    parts: int

    def __repr__(self) -> str:
        return f"bands {self.first} to {self.stop - 1}, part {self.part} of {self.parts}"

    @property
    def size(self) -> int:
        """Hashes that are looked at."""
        return sum(self.counts) * (self.stop - self.first)

    @property
    def path(self) -> Path:
        """Where the pairs stand, sorted."""
        return self.folder / f"band-{self.first:03d}-{self.stop:03d}.{self.part}of{self.parts}.pairs"


def bands_of(folder: Path, counts: Sequence[int], bands: int, memory: int) -> list[Bands]:
    """The work of finding all pairs, so cut that each part fits into `memory`; few documents are searched for several bands at a time."""
    parts = parts_of(sum(counts), ROW, memory)
    several = max(TOGETHER // max(sum(counts), 1), 1)
    firsts = range(0, bands, several)
    return [
        Bands(folder, tuple(counts), first, min(first + several, bands), part, parts)
        for first in firsts
        for part in range(parts)
    ]


def find_pairs(bands: Bands) -> int:
    """Write the pairs of documents that agree in one of these bands; how many there are."""
    if not bands.path.is_file():
        found = [_pairs_of(*_read_band(bands, band)) for band in range(bands.first, bands.stop)]
        write_bytes(bands.path, [np.unique(np.concatenate(found)).tobytes()])
    return bands.path.stat().st_size // 8


def band_path(folder: Path, piece: int) -> Path:
    """The band hashes of a piece's documents, band after band."""
    return folder / f"{piece:05d}.bands"


def _read_band(bands: Bands, band: int) -> tuple[Hashes, NDArray[np.uint64]]:
    hashes, numbers, start = [], [], 0
    for piece, count in enumerate(bands.counts):
        here = np.fromfile(band_path(bands.folder, piece), np.uint64, count, offset=band * count * 8)
        chosen = np.flatnonzero(here % np.uint64(bands.parts) == bands.part)
        hashes.append(here[chosen])
        numbers.append((chosen + start).astype(np.uint64))
        start += count
    return np.concatenate(hashes), np.concatenate(numbers)


def _pairs_of(hashes: Hashes, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Pairs within each bucket as (first << 32 | second), first < second, sorted: all of a small bucket, links of a large one."""
    order = np.argsort(hashes, kind="stable")
    hashes, numbers = hashes[order], numbers[order]
    starts = np.flatnonzero(np.append(True, hashes[1:] != hashes[:-1])[: len(hashes)])
    sizes = np.diff(np.append(starts, len(hashes)))
    sizes, starts = sizes[sizes > 1], starts[sizes > 1]
    members = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
    firsts = np.repeat(starts, sizes)
    found = [np.zeros(0, np.uint64)]
    for step in range(LINKS):
        for others in (firsts + step, members - 1 - step):
            real = (others >= firsts) & (others < members)
            found.append(numbers[others[real]] << np.uint64(32) | numbers[members[real]])
    return np.unique(np.concatenate(found))


def merge_pairs(bands: list[Bands], path: Path, marks: Path) -> int:
    """One sorted file of all different pairs, and a file with a byte for each document that is 1 where it is in a pair."""
    if path.is_file() and marks.is_file():
        return path.stat().st_size // 8
    marked = np.zeros(sum(bands[0].counts), dtype=np.uint8)
    with writing(path) as stream:
        for pairs in _merged(bands):
            stream.write(pairs.tobytes())
            marked[(pairs >> np.uint64(32)).astype(np.int64)] = 1
            marked[(pairs & np.uint64(2**32 - 1)).astype(np.int64)] = 1
    write_bytes(marks, [marked.tobytes()])
    return path.stat().st_size // 8


def _merged(bands: list[Bands]) -> Iterator[NDArray[np.uint64]]:
    """All pairs in order, each once: whatever is not above the least of the blocks' last ones is whole."""
    left = {band.path: band.path.stat().st_size // 8 for band in bands if band.path.stat().st_size}
    blocks = {path: np.zeros(0, np.uint64) for path in left}
    each = max(BLOCK // max(len(left), 1), 1)
    while blocks:
        for path in list(blocks):
            if not len(blocks[path]):
                size = path.stat().st_size // 8
                blocks[path] = np.fromfile(path, np.uint64, each, offset=(size - left[path]) * 8)
                left[path] -= len(blocks[path])
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
