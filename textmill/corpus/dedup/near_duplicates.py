"""Near-duplicates over all pieces: sketch every document, find those that agree in a band, confirm by true Jaccard similarity."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from textmill.config import CorpusConfig
from textmill.corpus.dedup.candidates import band_path
from textmill.corpus.dedup.clusters import Clusters
from textmill.corpus.dedup.minhash import band_hashes, bands_for
from textmill.corpus.dedup.shingles import STRETCH, Hashes, Unit, distinct, jaccard, shingle, shingle_set
from textmill.corpus.passes import Work
from textmill.corpus.shards import open_shard
from textmill.storage.files import write_bytes, writing

BLOCK_CHARACTERS, BLOCK_DOCUMENTS = 1 << 17, 1 << 10
"""Documents that are sketched at a time: few enough for the processor's cache, many enough for numpy."""
PAIRS = 1 << 15
"""Pairs that are confirmed at a time; pairs that these make needless are left out."""
HELD = 32 << 20
"""Bytes of shingle sets that a process holds at most: the pairs come in order, and the system holds the files besides."""
OPEN = 16
"""Pieces of which a process knows at a time where their sets stand."""
PAIR = np.dtype([("first", "<u4"), ("second", "<u4"), ("jaccard", "<f8")])


def sketch_piece(work: Work) -> int:
    """Band hashes and lengths in characters of the documents of a piece that are no exact copies; how many they are."""
    keep = np.fromfile(work.path("exact"), dtype=np.bool_)
    count = int(keep.sum())
    if work.path("lengths").is_file():
        return count
    bands, rows = bands_for(work.config.dedup_threshold)
    done = 0
    # The lengths appear last, and say that both files are whole.
    with (
        writing(work.path("lengths")) as lengths,
        writing(band_path(work.folder / "work", work.piece.number)) as stream,
    ):
        for texts in _blocks(_texts(work, keep)):
            hashes, counts = _shingles(texts, work.config.dedup_shingles, work.config.dedup_n)
            found = band_hashes(hashes, counts, bands, rows)
            for band in range(bands):
                stream.seek((band * count + done) * 8)
                stream.write(np.ascontiguousarray(found[:, band]).tobytes())
            lengths.write(np.array([len(text) for text in texts], np.int64).tobytes())
            done += len(texts)
    return count


def _sets(texts: list[str], config: CorpusConfig) -> list[Hashes]:
    hashes, counts = _shingles(texts, config.dedup_shingles, config.dedup_n)
    return [distinct(part) for part in np.split(hashes, np.cumsum(counts)[:-1])]


def _shingles(texts: list[str], unit: Unit, n: int) -> tuple[Hashes, NDArray[np.int64]]:
    if len(texts) == 1 and len(texts[0]) > STRETCH:
        found = shingle_set(texts[0], unit, n)
        return found, np.array([len(found)])
    return shingle(texts, unit, n)


def _texts(work: Work, keep: NDArray[np.bool_]) -> Iterator[str]:
    """The texts of a piece that are marked, one after another."""
    done = 0
    with open_shard(work.path("parquet")) as cleaned:
        for group in range(cleaned.num_row_groups):
            rows = cleaned.metadata.row_group(group).num_rows
            wanted = keep[done : done + rows]
            done += rows
            if wanted.any():
                column = cleaned.read_row_group(group, columns=["text"], use_threads=False).column(0)
                yield from column.filter(pa.array(wanted)).to_pylist()


def _blocks(texts: Iterator[str]) -> Iterator[list[str]]:
    held: list[str] = []
    size = 0
    for text in texts:
        if held and (size + len(text) > BLOCK_CHARACTERS or len(held) == BLOCK_DOCUMENTS):
            yield held
            held, size = [], 0
        held.append(text)
        size += len(text)
    if held:
        yield held


@dataclass(frozen=True)
class Spill:
    """One piece and where its documents begin in the numbering of all that are no exact copies."""

    work: Work
    start: int

    def __repr__(self) -> str:
        return repr(self.work)

    @property
    def size(self) -> int:
        """Bytes of the piece."""
        return self.work.size


def spill_sets(spill: Spill) -> int:
    """Write the shingle set of each document of a piece that is in some pair, and where it ends; how many these are."""
    work = spill.work
    keep = np.fromfile(work.path("exact"), dtype=np.bool_)
    marked = np.fromfile(work.folder / "work" / "marks", dtype=np.bool_, count=int(keep.sum()), offset=spill.start)
    if not work.path("ends").is_file():
        wanted = keep.copy()
        wanted[keep] = marked
        sizes = np.zeros(len(marked), np.int64)
        with writing(work.path("sets")) as stream:
            found = chain.from_iterable(map(partial(_sets, config=work.config), _blocks(_texts(work, wanted))))
            for place, one in zip(np.flatnonzero(marked), found, strict=True):
                stream.write(one.tobytes())
                sizes[place] = len(one)
        write_bytes(work.path("ends"), [np.cumsum(sizes).tobytes()])
    return int(marked.sum())


@dataclass
class Sets:
    """The shingle sets on disk, by document number; the last ones read are held, in bounded memory."""

    folder: Path
    starts: NDArray[np.int64]
    memory: int
    held: OrderedDict[int, Hashes] = field(default_factory=OrderedDict)
    held_bytes: int = 0
    ends: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    """Where the sets of a piece end, for the pieces last looked into."""

    def __getitem__(self, number: int) -> Hashes:
        if number in self.held:
            self.held.move_to_end(number)
            return self.held[number]
        found = self._read(number)
        self.held[number] = found
        self.held_bytes += found.nbytes
        while self.held_bytes > self.memory and len(self.held) > 2:
            self.held_bytes -= self.held.popitem(last=False)[1].nbytes
        return found

    def size_of(self, number: int) -> int:
        """How many shingles a document has, without reading them."""
        first, last = self._range(number)[1:]
        return last - first

    def _range(self, number: int) -> tuple[int, int, int]:
        piece = int(np.searchsorted(self.starts, number, side="right")) - 1
        place = number - int(self.starts[piece])
        if piece not in self.ends:
            if len(self.ends) == OPEN:
                self.ends.pop(next(iter(self.ends)))
            self.ends[piece] = np.fromfile(self.folder / f"{piece:05d}.ends", np.int64)
        ends = self.ends[piece]
        return piece, int(ends[place - 1]) if place else 0, int(ends[place])

    def _read(self, number: int) -> Hashes:
        piece, first, last = self._range(number)
        return np.fromfile(self.folder / f"{piece:05d}.sets", np.uint64, last - first, offset=8 * first)


@dataclass(frozen=True)
class Confirm:
    """A stretch of the file of pairs."""

    folder: Path
    counts: tuple[int, ...]
    number: int
    pairs: int
    threshold: float
    memory: int

    def __repr__(self) -> str:
        return f"candidate pairs from {self.number * PAIRS:,} on"

    @property
    def size(self) -> int:
        """Pairs to look at."""
        return min(PAIRS, self.pairs - self.number * PAIRS)

    @property
    def path(self) -> Path:
        """Where the pairs that are near-duplicates stand."""
        return self.folder / f"confirmed-{self.number:05d}"


def confirm_pairs(task: Confirm) -> int:
    """Keep the pairs whose true similarity reaches the threshold; one whose two are joined by others already is passed over."""
    if not task.path.is_file():
        starts = np.cumsum([0, *task.counts[:-1]])
        # Of pieces without documents the last one that begins here is found, and it is the one that has the document.
        sets, clusters, rows = Sets(task.folder, starts, task.memory), Clusters(), []
        for pair in np.fromfile(task.folder / "pairs", np.uint64, PAIRS, offset=task.number * PAIRS * 8).tolist():
            first, second = pair >> 32, pair & (2**32 - 1)
            if clusters.of(first) == clusters.of(second):
                continue
            small, large = sorted((sets.size_of(first), sets.size_of(second)))
            if small / large < task.threshold:
                continue  # so different in size that they cannot be alike
            similarity = jaccard(sets[first], sets[second])
            if similarity >= task.threshold:
                clusters.join(first, second)
                rows.append((first, second, similarity))
        write_bytes(task.path, [np.array(rows, PAIR).tobytes()])
    return task.path.stat().st_size // PAIR.itemsize
