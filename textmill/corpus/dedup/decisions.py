"""Decide for every cleaned document which split it belongs to, or that it is a dropped duplicate.

Documents are numbered over all chunks; near-duplicate search numbers those that are no exact duplicates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.config import CorpusConfig
from textmill.corpus.chunk_task import DROPPED, DUPLICATE, GAP, NEAR_DUPLICATE, ChunkTask
from textmill.corpus.dedup.minhash import choose_bands
from textmill.corpus.dedup.near_duplicates import (
    PAIR_DTYPE,
    PAIRS_PER_TASK,
    ConfirmTask,
    confirm_pairs,
    find_candidate_pairs,
    sketch_chunk,
    write_shingle_sets,
)
from textmill.corpus.dropped import REPEAT_DTYPE
from textmill.corpus.split import DIGEST_BYTES, assign_groups, assign_splits, file_digest, split_records
from textmill.errors import TextmillError
from textmill.storage.files import write_bytes, write_json

RunTasks = Callable[[Callable[[Any], Any], Sequence[Any], str, str], list[Any]]
"""Runs a function over tasks and shows progress; arguments: function, tasks, title, unit of a task's size."""
MAX_DOCUMENTS = 2**32
"""The most documents that near-duplicate search can number."""


@dataclass(frozen=True)
class Decisions:
    """The decisions for each chunk, in order."""

    splits: list[NDArray[np.int8]]
    """For each cleaned document, the index of its split in SPLITS, or why it is dropped (see DROPPED)."""
    repeats: list[NDArray[Any]]
    """The dropped duplicates, each with the document that it repeats."""


def write_decisions(tasks: Sequence[ChunkTask], decisions: Decisions) -> None:
    """Write them for `prepare.write_chunk`, which reads those of its own chunk."""
    for task, split_indexes, repeats in zip(tasks, decisions.splits, decisions.repeats, strict=True):
        write_bytes(task.path("splits"), [split_indexes.tobytes()])
        if task.config.keep_dropped:
            write_bytes(task.path("repeats"), [repeats.tobytes()])
            write_json(task.path("names"), task.source_names)


def decide_documents(
    tasks: Sequence[ChunkTask], ratios: Mapping[str, tuple[float, ...]], config: CorpusConfig, run: RunTasks
) -> Decisions:
    """Assign splits by the ratios of each source, by name, then drop exact duplicates, then near-duplicates; of those
    in several splits the one in train is kept."""
    digests = np.concatenate([task.read_digests() for task in tasks])
    splits, is_gap = _assign_splits(tasks, ratios, config.split_by, digests)
    ends = np.cumsum([task.read_rows().sum() for task in tasks])
    repeats = np.zeros(0, REPEAT_DTYPE)
    if config.dedup != "none":
        kept = find_kept_equals(digests, splits)
        dropped = np.flatnonzero(kept != np.arange(len(kept)))
        repeats = _list_repeats(ends, dropped, kept[dropped], np.ones(len(dropped)), is_near=False)
        splits[dropped] = DROPPED[DUPLICATE]
    if config.dedup == "near":
        rows = np.flatnonzero(splits >= 0)
        pairs = _find_near_duplicates(tasks, np.split(splits >= 0, ends[:-1]), config, run)
        clusters = smallest_members(len(rows), pairs["first"].astype(np.int64), pairs["second"].astype(np.int64))
        lengths = np.concatenate([np.fromfile(task.path("lengths"), np.int64) for task in tasks])
        is_kept = keep_one_per_cluster(clusters, lengths, splits[rows])
        document, other, similarity = _best_matches(pairs, is_kept)
        near = _list_repeats(ends, rows[document], rows[other], similarity, is_near=True)
        repeats = np.concatenate([repeats, near])
        splits[rows[~is_kept]] = DROPPED[NEAR_DUPLICATE]
    splits[is_gap & (splits >= 0)] = DROPPED[GAP]
    repeats = np.sort(repeats, order="row")
    of_chunks = np.split(repeats, np.searchsorted(repeats["row"], ends[:-1]))
    for of_chunk, start in zip(of_chunks, [0, *ends[:-1]], strict=True):
        of_chunk["row"] -= start
    return Decisions(np.split(splits, ends[:-1]), of_chunks)


def _assign_splits(
    tasks: Sequence[ChunkTask], ratios: Mapping[str, tuple[float, ...]], split_by: str, digests: NDArray[np.uint8]
) -> tuple[NDArray[np.int8], NDArray[np.bool_]]:
    """The split of each cleaned document, by the ratios of its source, and which documents are in a gap."""
    if split_by in ("file", "source"):
        digests = np.concatenate([_source_digests(task, split_by) for task in tasks])
    elif split_by.startswith("field:"):
        digests = np.concatenate([np.fromfile(task.path("fields"), np.uint8) for task in tasks])
        digests = digests.reshape(-1, DIGEST_BYTES)
    elif split_by == "position":
        cuts = np.concatenate([np.fromfile(task.path("cuts"), np.int64) for task in tasks])
    numbers = {one: number for number, one in enumerate(dict.fromkeys(ratios.values()))}
    of_row = np.concatenate(
        [np.repeat([numbers[ratios[name]] for name in task.source_names], task.read_rows()) for task in tasks]
    )
    splits = np.zeros(len(digests), np.int8)
    is_gap = np.zeros(len(digests), np.bool_)
    for one, number in numbers.items():
        rows = np.flatnonzero(of_row == number)
        if split_by == "position":
            splits[rows], is_gap[rows] = split_records(cuts[rows], digests[rows], one)
        else:
            splits[rows] = (assign_splits if split_by == "document" else assign_groups)(digests[rows], one)
    return splits, is_gap


def _source_digests(task: ChunkTask, split_by: str) -> NDArray[np.uint8]:
    """For each cleaned document of a chunk the hash of its file, or of the name of its source if it has one."""
    groups = [chunk.source.group if split_by == "source" else "" for chunk in task.chunks]
    digests = [file_digest(group or name) for group, name in zip(groups, task.source_names, strict=True)]
    names = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES)
    return np.repeat(names, task.read_rows(), axis=0)


def find_kept_equals(digests: NDArray[np.uint8], splits: NDArray[np.int8]) -> NDArray[np.int64]:
    """For each document the one of the same digest that is kept: the first of them, where those in train (split 0) come
    first."""
    halves = digests.view(np.uint64).reshape(-1, 2)
    order = np.lexsort([splits > 0, halves[:, 1], halves[:, 0]])  # stable: of equal digests, the first comes first
    halves = halves[order]
    is_first = np.append(True, (halves[1:] != halves[:-1]).any(axis=1))[: len(order)]
    kept = np.empty(len(order), np.int64)
    kept[order] = order[is_first][np.cumsum(is_first) - 1]
    return kept


def _find_near_duplicates(
    tasks: Sequence[ChunkTask], masks: Sequence[NDArray[np.bool_]], config: CorpusConfig, run: RunTasks
) -> NDArray[Any]:
    """The confirmed pairs of near-duplicates; `masks`: which documents of a chunk are no exact duplicates."""
    folder = tasks[0].folder
    for task, mask in zip(tasks, masks, strict=True):
        write_bytes(task.path("exact"), [mask.tobytes()])
    counts = run(sketch_chunk, tasks, "prepare: sketch for near-duplicates", "bytes")
    if sum(counts) > MAX_DOCUMENTS:
        raise TextmillError(
            f"corpus.dedup=near supports at most {MAX_DOCUMENTS:,} documents; found {sum(counts):,}; use exact"
        )
    pairs = len(find_candidate_pairs(folder, counts, choose_bands(config.dedup_threshold)[0]))
    run(write_shingle_sets, tasks, "prepare: shingle candidates", "bytes")
    confirm_tasks = [
        ConfirmTask(folder, tuple(counts), number, pairs, config.dedup_threshold)
        for number in range(-(-pairs // PAIRS_PER_TASK))
    ]
    run(confirm_pairs, confirm_tasks, "prepare: confirm candidates", "pairs")
    confirmed = [np.fromfile(task.path, PAIR_DTYPE) for task in confirm_tasks]
    return np.concatenate([np.zeros(0, PAIR_DTYPE), *confirmed])


def smallest_members(count: int, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each of `count` numbers, the smallest member of its cluster; each first number is joined with its second."""
    smallest = np.arange(count)
    while ((roots := smallest[first]) != (others := smallest[second])).any():
        np.minimum.at(smallest, np.maximum(roots, others), np.minimum(roots, others))
        while ((parents := smallest[smallest]) != smallest).any():
            smallest = parents
    return smallest


def keep_one_per_cluster(
    clusters: NDArray[np.int64], lengths: NDArray[np.int64], splits: NDArray[np.int8]
) -> NDArray[np.bool_]:
    """Which documents are kept: of each cluster one in train (split 0) if possible, the longest, the first."""
    order = np.lexsort([-lengths, splits > 0, clusters])
    kept = np.zeros(len(clusters), np.bool_)
    kept[order[np.flatnonzero(np.diff(clusters[order], prepend=-1))]] = True
    return kept


def _list_repeats(
    ends: NDArray[np.int64], rows: NDArray[np.int64], others: NDArray[np.int64], similarity: Any, *, is_near: bool
) -> NDArray[Any]:
    """Dropped duplicates with the documents that they repeat, in the chunks that end at `ends`."""
    chunks = np.searchsorted(ends, others, side="right")
    repeats = np.zeros(len(rows), REPEAT_DTYPE)
    repeats["row"] = rows
    repeats["chunk"] = chunks
    repeats["other"] = others - np.append(0, ends)[chunks]
    repeats["similarity"], repeats["near"] = similarity, is_near
    return repeats


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
