"""Decide for every cleaned document which split it belongs to, or that it is a dropped duplicate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.config import CorpusConfig
from textmill.corpus.chunk_task import DROPPED, ChunkTask
from textmill.corpus.dedup.clusters import exact_keep_masks, keep_one_per_cluster, smallest_members
from textmill.corpus.dedup.minhash import choose_bands
from textmill.corpus.dedup.near_duplicates import (
    CACHE_BYTES,
    PAIR_DTYPE,
    PAIRS_PER_TASK,
    ConfirmTask,
    ShingleTask,
    confirm_pairs,
    find_candidate_pairs,
    merge_pairs,
    plan_band_tasks,
    sketch_chunk,
    write_shingle_sets,
)
from textmill.corpus.dropped import EXACT, GAP, NEAR, REPEAT_DTYPE
from textmill.corpus.shards import take_rows
from textmill.corpus.split import DIGEST_BYTES, assign_groups, assign_splits, file_digest, split_records
from textmill.errors import TextmillError
from textmill.storage.files import write_bytes, write_json

RunTasks = Callable[[Callable[[Any], Any], Sequence[Any], str, str], list[Any]]
"""Runs a function over tasks and shows progress; arguments: function, tasks, title, unit of a task's size."""
SHOWN_PAIRS = 100
"""Near-duplicate pairs written to near_duplicates.jsonl."""
PREVIEW_CHARACTERS = 200
"""Characters of each text in that file."""
MEMORY = 512 << 20
"""Bytes that a process may use to sort hashes or hold shingles; the result does not depend on it."""
MAX_DOCUMENTS = 2**32
"""The most documents that near-duplicate search can number."""


@dataclass(frozen=True)
class Decisions:
    """The decisions for each chunk, in order."""

    splits: list[NDArray[np.int8]]
    """For each cleaned document, the index of its split in SPLITS, or why it is dropped (see DROPPED)."""
    pairs: list[dict[str, Any]]
    """The first near-duplicate pairs, for the user to inspect."""
    repeats: list[NDArray[Any]]
    """With `corpus.keep_dropped`: the dropped duplicates, each with the document that it repeats."""


def write_decisions(tasks: Sequence[ChunkTask], decisions: Decisions) -> None:
    """Write them for `prepare.write_chunk`, which reads those of its own chunk."""
    for task, split_indexes in zip(tasks, decisions.splits, strict=True):
        write_bytes(task.path("splits"), [split_indexes.tobytes()])
    for task, repeats in zip(tasks, decisions.repeats, strict=False):  # empty without corpus.keep_dropped
        write_bytes(task.path("repeats"), [np.sort(repeats, order="row").tobytes()])
        write_json(task.path("names"), task.source_names)


def decide_documents(
    tasks: Sequence[ChunkTask], ratios: Mapping[str, tuple[float, ...]], config: CorpusConfig, run: RunTasks
) -> Decisions:
    """Assign splits by the ratios of each source, by name, then drop exact duplicates, then near-duplicates."""
    splits, gaps = _assign_splits(tasks, ratios, config.split_by)
    may_straddle = len(set(ratios.values())) > 1 or config.split_by != "document"
    decisions = _drop_duplicates(tasks, splits, may_straddle, config, run)
    for split, is_gap in zip(splits, gaps, strict=True):
        split[is_gap & (split >= 0)] = DROPPED[GAP]
    return decisions


def _drop_duplicates(
    tasks: Sequence[ChunkTask], splits: list[NDArray[np.int8]], may_straddle: bool, config: CorpusConfig, run: RunTasks
) -> Decisions:
    """Drop exact duplicates, then near-duplicates; of those in several splits the one in train is kept.

    `may_straddle`: exact duplicates may be in several splits.
    """
    if config.dedup == "none":
        return Decisions(splits, [], [np.zeros(0, REPEAT_DTYPE) for _ in tasks] if config.keep_dropped else [])
    # For each chunk: which documents are left after exact deduplication.
    masks = exact_keep_masks(_LazyDigests(tasks), splits if may_straddle else None, MEMORY)
    for split, mask in zip(splits, masks, strict=True):
        split[~mask] = DROPPED[EXACT]
    repeats = find_exact_repeats(_LazyDigests(tasks), masks) if config.keep_dropped else []
    if config.dedup == "exact":
        return Decisions(splits, [], repeats)
    for task, mask in zip(tasks, masks, strict=True):
        write_bytes(task.path("exact"), [mask.tobytes()])
    pair_files = _find_near_duplicates(tasks, config, run)
    is_kept = _choose_kept(pair_files, tasks, masks, splits)
    # The number of each chunk's first document: 3, 0 and 2 documents start at 0, 3 and 3; the last entry is their sum.
    starts = np.cumsum([0, *(mask.sum() for mask in masks)])
    for chunk, (start, stop) in enumerate(pairwise(starts.tolist())):
        near_duplicates = np.flatnonzero(masks[chunk])[~is_kept[start:stop]]
        splits[chunk][near_duplicates] = DROPPED[NEAR]
    if config.keep_dropped:
        near_repeats = find_near_repeats(pair_files, is_kept, starts[:-1], masks)
        repeats = [np.concatenate([exact, near]) for exact, near in zip(repeats, near_repeats, strict=True)]
    pairs = _preview_pairs(pair_files, tasks, starts, masks, is_kept)
    return Decisions(splits, pairs, repeats)


def _assign_splits(
    tasks: Sequence[ChunkTask], ratios: Mapping[str, tuple[float, ...]], split_by: str
) -> tuple[list[NDArray[np.int8]], list[NDArray[np.bool_]]]:
    """The split of each cleaned document, by the ratios of its source, and which documents are in a gap."""
    if split_by != "document":
        return _split_groups(tasks, ratios, split_by)
    splits = []
    for task in tasks:
        digests = task.read_digests()
        of_task = np.zeros(len(digests), np.int8)
        for one, rows in _rows_by_ratios(task, ratios):
            of_task[rows] = assign_splits(digests[rows], one)
        splits.append(of_task)
    return splits, [np.zeros(len(one), np.bool_) for one in splits]


def _split_groups(
    tasks: Sequence[ChunkTask], ratios: Mapping[str, tuple[float, ...]], split_by: str
) -> tuple[list[NDArray[np.int8]], list[NDArray[np.bool_]]]:
    """The same where documents of all chunks depend on each other: lines of one file may be in several chunks."""
    bounds = np.cumsum([task.read_rows().sum() for task in tasks])
    digests = np.concatenate([_group_digests(task, split_by) for task in tasks])
    cuts = [np.fromfile(task.path("cuts"), np.int64) for task in tasks] if split_by == "position" else []
    numbers = {one: number for number, one in enumerate(dict.fromkeys(ratios.values()))}
    of_row = np.concatenate(
        [np.repeat([numbers[ratios[name]] for name in task.source_names], task.read_rows()) for task in tasks]
    )
    splits = np.zeros(len(digests), np.int8)
    is_gap = np.zeros(len(digests), np.bool_)
    for one, number in numbers.items():
        rows = np.flatnonzero(of_row == number)
        if cuts:
            splits[rows], is_gap[rows] = split_records(np.concatenate(cuts)[rows], digests[rows], one)
        else:
            splits[rows] = assign_groups(digests[rows], one)
    return np.split(splits, bounds[:-1]), np.split(is_gap, bounds[:-1])


def _group_digests(task: ChunkTask, split_by: str) -> NDArray[np.uint8]:
    """For each cleaned document of a chunk the hash that it shares with those it is kept together with."""
    if split_by.startswith("field:"):
        return np.fromfile(task.path("fields"), np.uint8).reshape(-1, DIGEST_BYTES)
    if split_by == "position":
        return task.read_digests()
    names = np.frombuffer(b"".join(map(file_digest, task.source_names)), np.uint8).reshape(-1, DIGEST_BYTES)
    return np.repeat(names, task.read_rows(), axis=0)


def _rows_by_ratios(
    task: ChunkTask, ratios: Mapping[str, tuple[float, ...]]
) -> Iterator[tuple[tuple[float, ...], NDArray[np.int64]]]:
    """The cleaned documents of the sources that have the same ratios."""
    numbers = {one: number for number, one in enumerate(dict.fromkeys(ratios[name] for name in task.source_names))}
    of_row = np.repeat([numbers[ratios[name]] for name in task.source_names], task.read_rows())
    for one, number in numbers.items():
        yield one, np.flatnonzero(of_row == number)


class _LazyDigests(Sequence[Any]):
    """The digests of all chunks; each chunk is read when needed, so that not all are in memory."""

    def __init__(self, tasks: Sequence[ChunkTask]) -> None:
        self.tasks = tasks

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, index: Any) -> Any:
        return self.tasks[index].read_digests()


def _find_near_duplicates(tasks: Sequence[ChunkTask], config: CorpusConfig, run: RunTasks) -> list[Path]:
    """Find near-duplicate pairs with MinHash LSH; return the files that hold the confirmed pairs."""
    folder = tasks[0].folder / "work"
    counts = run(sketch_chunk, tasks, "prepare: sketch for near-duplicates", "bytes")
    if sum(counts) > MAX_DOCUMENTS:
        raise TextmillError(
            f"corpus.dedup=near supports at most {MAX_DOCUMENTS:,} documents; found {sum(counts):,}; use exact"
        )
    bands = plan_band_tasks(folder, counts, choose_bands(config.dedup_threshold)[0], MEMORY)
    run(find_candidate_pairs, bands, "prepare: find candidates", "hashes")
    pairs = merge_pairs(bands, folder / "pairs", folder / "marks")
    starts = np.cumsum([0, *counts[:-1]]).tolist()
    run(
        write_shingle_sets,
        [ShingleTask(task, start) for task, start in zip(tasks, starts, strict=True)],
        "prepare: shingle candidates",
        "bytes",
    )
    limits = config.dedup_threshold, min(MEMORY, CACHE_BYTES)
    confirm_tasks = [
        ConfirmTask(folder, tuple(counts), number, pairs, *limits) for number in range(-(-pairs // PAIRS_PER_TASK))
    ]
    run(confirm_pairs, confirm_tasks, "prepare: confirm candidates", "pairs")
    return [confirm_task.path for confirm_task in confirm_tasks]


def _choose_kept(
    pair_files: Sequence[Path],
    tasks: Sequence[ChunkTask],
    masks: Sequence[NDArray[np.bool_]],
    splits: Sequence[NDArray[np.int8]],
) -> NDArray[np.bool_]:
    """For each document left after exact deduplication, whether it is kept."""
    pairs = (np.fromfile(path, PAIR_DTYPE) for path in pair_files)
    number_pairs = (np.stack((block["first"], block["second"]), axis=1).astype(np.int64) for block in pairs)
    clusters = smallest_members(sum(int(mask.sum()) for mask in masks), number_pairs)
    lengths = (np.fromfile(task.path("lengths"), np.int64) for task in tasks)
    unique_splits = (split[mask] for split, mask in zip(splits, masks, strict=True))
    return keep_one_per_cluster(clusters, zip(lengths, unique_splits, strict=True))


def _preview_pairs(
    pair_files: Sequence[Path],
    tasks: Sequence[ChunkTask],
    starts: NDArray[np.int64],
    masks: Sequence[NDArray[np.bool_]],
    is_kept: NDArray[np.bool_],
) -> list[dict[str, Any]]:
    """The rows of near_duplicates.jsonl: the first pairs."""
    blocks = [np.fromfile(path, PAIR_DTYPE, SHOWN_PAIRS) for path in pair_files]
    pairs = np.concatenate([np.zeros(0, PAIR_DTYPE), *blocks])[:SHOWN_PAIRS]
    numbers = np.unique(np.concatenate((pairs["first"], pairs["second"]))).astype(np.int64)
    chunks = np.searchsorted(starts, numbers, side="right") - 1
    previews: dict[int, dict[str, Any]] = {}
    for chunk in np.unique(chunks).tolist():
        numbers_here = numbers[chunks == chunk]
        rows = np.flatnonzero(masks[chunk])[numbers_here - starts[chunk]]
        found = take_rows(tasks[chunk].path("parquet"), ["text", "id"], rows).to_pylist()
        names = tasks[chunk].source_names
        sources = tasks[chunk].sources_of_rows()[rows].tolist()
        for number, row, source in zip(numbers_here.tolist(), found, sources, strict=True):
            previews[number] = {
                "file": names[source],
                "place": row["id"],
                "kept": bool(is_kept[number]),
                "text": row["text"][:PREVIEW_CHARACTERS],
            }
    return [
        {"jaccard": round(similarity, 4), "first": previews[first], "second": previews[second]}
        for first, second, similarity in pairs.tolist()
    ]


def find_exact_repeats(digests: Sequence[NDArray[np.uint8]], keep: Sequence[NDArray[np.bool_]]) -> list[NDArray[Any]]:
    """For each chunk, its exact duplicates with the document of the same digest that is kept.

    `keep`: for each chunk, which documents exact deduplication keeps.
    """
    dropped = [rows[~mask] for rows, mask in zip(digests, keep, strict=True)]
    prefixes = np.unique(np.concatenate([np.zeros(0, np.uint64), *map(_prefixes, dropped)]))
    kept_by_digest: dict[bytes, tuple[int, int]] = {}  # the chunk and the row; only where a duplicate is likely
    for chunk, mask in enumerate(keep):
        rows = digests[chunk]
        for row in np.flatnonzero(mask & np.isin(_prefixes(rows), prefixes)).tolist():
            kept_by_digest[rows[row].tobytes()] = chunk, row
    repeats = []
    for rows, mask in zip(digests, keep, strict=True):
        dropped_rows = np.flatnonzero(~mask).tolist()
        entries = [(row, *kept_by_digest[rows[row].tobytes()], 1.0, False) for row in dropped_rows]
        repeats.append(np.array(entries, REPEAT_DTYPE))
    return repeats


def find_near_repeats(
    pair_files: Sequence[Path],
    is_kept: NDArray[np.bool_],
    starts: NDArray[np.int64],
    masks: Sequence[NDArray[np.bool_]],
) -> list[NDArray[Any]]:
    """For each chunk, its near-duplicates with the most similar document, one that is kept if there is any.

    `is_kept`: by number over all chunks, of the documents left after exact deduplication; `starts`: the number of each
    chunk's first; `masks`: which documents of a chunk are left after exact deduplication.
    """
    pairs = np.concatenate([np.zeros(0, PAIR_DTYPE), *(np.fromfile(path, PAIR_DTYPE) for path in pair_files)])
    document, other, similarity = _best_matches(pairs, is_kept)
    row_of = np.concatenate([np.flatnonzero(mask) for mask in masks])  # in its chunk, by number
    repeats = np.zeros(len(document), REPEAT_DTYPE)
    repeats["row"] = row_of[document]
    repeats["chunk"] = np.searchsorted(starts, other, side="right") - 1
    repeats["other"] = row_of[other]
    repeats["similarity"], repeats["near"] = similarity, True
    return np.split(repeats, np.searchsorted(document, starts[1:]))


def _best_matches(
    pairs: NDArray[Any], is_kept: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Each dropped document of a pair, in order, with its best match and how similar it is."""
    first = pairs["first"].astype(np.int64)
    second = pairs["second"].astype(np.int64)
    # Each pair in both directions, then only those from a dropped document to another.
    document = np.concatenate((first, second))
    other = np.concatenate((second, first))
    similarity = np.concatenate((pairs["jaccard"], pairs["jaccard"])).astype(np.float32)
    is_dropped = ~is_kept[document]
    document = document[is_dropped]
    other = other[is_dropped]
    similarity = similarity[is_dropped]
    # By document; its best match comes first: kept, then most similar, then first in the corpus.
    order = np.lexsort((other, -similarity, ~is_kept[other], document))
    best = order[np.flatnonzero(np.diff(document[order], prepend=-1))]
    return document[best], other[best], similarity[best]


def _prefixes(digests: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The first eight bytes of each digest, as a number."""
    return np.ascontiguousarray(digests[:, :8]).view(np.uint64).reshape(-1)
