"""What becomes of every cleaned document: on which side it stands, or as what kind of copy it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from textmill.config import CorpusConfig
from textmill.corpus.dedup.candidates import bands_of, find_pairs, merge_pairs
from textmill.corpus.dedup.clusters import keep_masks, least_members, stay_of_clusters
from textmill.corpus.dedup.minhash import bands_for
from textmill.corpus.dedup.near_duplicates import (
    HELD,
    PAIR,
    PAIRS,
    Confirm,
    Spill,
    confirm_pairs,
    sketch_piece,
    spill_sets,
)
from textmill.corpus.document import SPLITS, Split
from textmill.corpus.passes import Work
from textmill.corpus.shards import open_shard
from textmill.corpus.source import Source
from textmill.corpus.split import sides_of
from textmill.errors import TextmillError
from textmill.storage.files import write_bytes

Run = Callable[[Callable[[Any], Any], Sequence[Any], str, str], list[Any]]
"""Maps a function over shards and shows the progress: function, shards, what to call it, unit of a shard's size."""
SHOWN = 100
"""Pairs of near-duplicates that are written for a person to look at."""
BEGINNING = 200
"""Characters of each text that are shown there."""
FEW = 64
"""Documents that are read at a time to show some."""
MOST = 2**32
"""Documents that near-duplicates are sought among."""


@dataclass(frozen=True)
class Fates:
    """Of each piece, in order."""

    sides: list[NDArray[np.int8]]
    """For each cleaned document its place in SPLITS; -1: a copy that goes."""
    dropped: list[dict[str, int]]
    """How many went as what."""
    pairs: list[dict[str, Any]]
    """The first pairs of near-duplicates."""


def decide_fates(
    works: Sequence[Work], declared: Mapping[Source, Split | None], config: CorpusConfig, run: Run
) -> Fates:
    """Sides by hash or as declared; then exact copies go, then near ones."""
    sides = [_sides(work, declared[work.piece.source]) for work in works]
    if config.dedup == "none":
        return Fates(sides, [{} for _ in works], [])
    memory = config.dedup_memory << 20
    keep = keep_masks(_Digests(works), sides if any(declared.values()) else None, memory)
    dropped = [{"duplicate": int((~mask).sum())} for mask in keep]
    for side, mask in zip(sides, keep, strict=True):
        side[~mask] = -1
    if config.dedup == "exact":
        return Fates(sides, dropped, [])
    for work, mask in zip(works, keep, strict=True):
        write_bytes(work.path("exact"), [mask.tobytes()])
    confirmed = _near_pairs(works, config, run)
    numbering = _Numbering(works, [int(mask.sum()) for mask in keep])
    stays = _staying(confirmed, numbering, keep, sides)
    for piece, (start, stop) in enumerate(pairwise(numbering.starts.tolist())):
        rows = np.flatnonzero(keep[piece])[~stays[start:stop]]
        sides[piece][rows] = -1
        if len(rows):
            dropped[piece]["near_duplicate"] = len(rows)
    return Fates(sides, dropped, list(_shown(_first_pairs(confirmed), numbering, keep, stays)))


def _sides(work: Work, declared: Split | None) -> NDArray[np.int8]:
    digests = work.digests()
    return (
        sides_of(digests, work.config.split)
        if declared is None
        else np.full(len(digests), SPLITS.index(declared), np.int8)
    )


class _Digests(Sequence[NDArray[np.uint8]]):
    """The digests of all pieces, read when asked for, so that they never are in memory all at once."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works

    def __len__(self) -> int:
        return len(self.works)

    @overload
    def __getitem__(self, index: int) -> NDArray[np.uint8]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[NDArray[np.uint8]]: ...
    def __getitem__(self, index: int | slice) -> NDArray[np.uint8] | Sequence[NDArray[np.uint8]]:
        return _Digests(self.works[index]) if isinstance(index, slice) else self.works[index].digests()


class _Numbering:
    """Documents that are no exact copies, numbered through all pieces."""

    def __init__(self, works: Sequence[Work], counts: Sequence[int]) -> None:
        self.works = works
        self.starts = np.cumsum([0, *counts])

    def by_piece(self, numbers: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """(piece, places there) of sorted numbers, pieces without any left out."""
        for piece, part in enumerate(np.split(numbers, np.searchsorted(numbers, self.starts[1:-1]))):
            if len(part):
                yield piece, part - self.starts[piece]


def _near_pairs(works: Sequence[Work], config: CorpusConfig, run: Run) -> list[Path]:
    """Files of pairs of near-duplicates that join all that belong together."""
    folder, memory = works[0].folder / "work", config.dedup_memory << 20
    counts = run(sketch_piece, works, "prepare: sketch for near-duplicates", "bytes")
    if sum(counts) > MOST:
        raise TextmillError(
            f"corpus.dedup: near-duplicates are sought among {MOST:,} documents at most; found {sum(counts):,}"
        )
    bands = bands_of(folder, counts, bands_for(config.dedup_threshold)[0], memory)
    run(find_pairs, bands, "prepare: find candidates", "documents")
    pairs = merge_pairs(bands, folder / "pairs", folder / "marks")
    starts = np.cumsum([0, *counts[:-1]]).tolist()
    run(
        spill_sets,
        [Spill(work, start) for work, start in zip(works, starts, strict=True)],
        "prepare: shingle candidates",
        "bytes",
    )
    limits = config.dedup_threshold, min(memory, HELD)
    tasks = [Confirm(folder, tuple(counts), number, pairs, *limits) for number in range(-(-pairs // PAIRS))]
    run(confirm_pairs, tasks, "prepare: confirm candidates", "pairs")
    return [task.path for task in tasks]


def _staying(
    confirmed: Sequence[Path],
    numbering: _Numbering,
    keep: Sequence[NDArray[np.bool_]],
    sides: Sequence[NDArray[np.int8]],
) -> NDArray[np.bool_]:
    """For each document that is no exact copy whether it stays."""
    pairs = (np.fromfile(path, PAIR) for path in confirmed)
    blocks = (np.stack((block["first"], block["second"]), axis=1).astype(np.int64) for block in pairs)
    lengths = (np.fromfile(work.path("lengths"), np.int64) for work in numbering.works)
    standing = (side[mask] for side, mask in zip(sides, keep, strict=True))
    return stay_of_clusters(least_members(int(numbering.starts[-1]), blocks), zip(lengths, standing, strict=True))


def _first_pairs(confirmed: Sequence[Path]) -> NDArray[Any]:
    found = np.zeros(0, PAIR)
    for path in confirmed:
        if len(found) < SHOWN:
            found = np.concatenate((found, np.fromfile(path, PAIR, SHOWN - len(found))))
    return found


def _shown(
    pairs: NDArray[Any], numbering: _Numbering, keep: Sequence[NDArray[np.bool_]], stays: NDArray[np.bool_]
) -> Iterator[dict[str, Any]]:
    numbers = np.unique(np.concatenate((pairs["first"], pairs["second"]))).astype(np.int64)
    told: dict[int, dict[str, Any]] = {}
    for piece, places in numbering.by_piece(numbers):
        work = numbering.works[piece]
        rows = _rows(work.path("parquet"), np.flatnonzero(keep[piece])[places])
        for place, (text, where) in zip(places.tolist(), rows, strict=True):
            number = place + int(numbering.starts[piece])
            told[number] = {"file": work.piece.source.name, "place": where, "kept": bool(stays[number]), "text": text}
    for first, second, similarity in pairs.tolist():
        yield {"jaccard": round(similarity, 4), "first": told[first], "second": told[second]}


def _rows(path: Path, wanted: NDArray[np.int64]) -> Iterator[tuple[str, str]]:
    """The beginning and the place of some documents of a piece; few are looked at a time, since this process does it."""
    done = 0
    with open_shard(path) as cleaned:
        for batch in cleaned.iter_batches(FEW, columns=["text", "id"], use_threads=False):
            here = wanted[(wanted >= done) & (wanted < done + batch.num_rows)] - done
            done += batch.num_rows
            for place in here.tolist():
                yield batch.column(0)[place].as_py()[:BEGINNING], batch.column(1)[place].as_py()
            if done > wanted[-1]:
                break
