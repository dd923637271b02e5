"""Which of the copies stays: exact duplicates by their digests, near-duplicates by the clusters that their pairs make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

DEFAULT_MEMORY = 512 << 20
SORT_BYTES_PER_DIGEST = 64
"""Bytes that a digest takes while it is sorted."""
MIN_SORT_BYTES, SORT_BYTES_PER_DOCUMENT = 16 << 20, 16
"""Bytes that sorting may always take, and for each document beyond that: little beside the passes that read text."""
BLOCK_DOCUMENTS = 1 << 18
"""Documents that are looked at together."""
NUMBER_MASK = np.uint64(2**32 - 1)
MAX_LENGTH = 2**31 - 1


def count_partitions(documents: int, row_bytes: int, memory: int) -> int:
    """How many parts to sort documents in, each of which takes `row` bytes: no more than `memory`, and far less for few documents."""
    return 1 + documents * row_bytes // min(memory, max(MIN_SORT_BYTES, documents * SORT_BYTES_PER_DOCUMENT))


def exact_keep_masks(
    digests: Sequence[NDArray[np.uint8]], splits: Sequence[NDArray[np.int8]] | None = None, memory: int = DEFAULT_MEMORY
) -> list[NDArray[np.bool_]]:
    """For each shard's rows of 16 bytes, which ones stay: of equal ones the first, one of train (side 0) before all others.

    Where all of them do not fit into `memory`, those that begin alike are taken at a time, and the shards gone through again.
    """
    keep = [np.ones(len(rows), dtype=np.bool_) for rows in digests]
    partitions = count_partitions(sum(map(len, keep)), SORT_BYTES_PER_DIGEST, memory)
    for partition in range(partitions):
        rows_found, chosen = [], [np.zeros((0, 2), np.uint64)]
        for rows in digests:
            halves = np.ascontiguousarray(rows).view(np.uint64).reshape(-1, 2)
            rows_found.append(np.flatnonzero(halves[:, 0] % np.uint64(partitions) == partition))
            chosen.append(halves[rows_found[-1]])
        halves = np.concatenate(chosen)
        keys = [halves[:, 1], halves[:, 0]]
        if splits is not None:
            keys.insert(0, np.concatenate([split[index] > 0 for split, index in zip(splits, rows_found, strict=True)]))
        order = np.lexsort(keys)  # stable: among equals the first in canonical order comes first
        halves = halves[order]
        kept = np.ones(len(order), dtype=np.bool_)
        kept[order[1:][(halves[1:] == halves[:-1]).all(axis=1)]] = False
        for mask, index, kept_here in zip(
            keep, rows_found, np.split(kept, np.cumsum([len(index) for index in rows_found])[:-1]), strict=False
        ):
            mask[index] = kept_here
    return keep


class Clusters:
    """Numbers joined into clusters, each known by its least member."""

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self._parents: dict[int, int] = {}
        for first, second in pairs:
            self.join(first, second)

    def find(self, number: int) -> int:
        """The least member of the cluster of `number`."""
        parents, root = self._parents, number
        while (parent := parents.get(root, root)) != root:
            root = parent
        while number != root:  # the way is short next time
            parents[number], number = root, parents[number]
        return root

    def join(self, first: int, second: int) -> None:
        """Make one cluster of two."""
        first, second = self.find(first), self.find(second)
        smallest = min(first, second)
        self._parents[first] = self._parents[second] = smallest

    def members(self) -> list[int]:
        """Every number that was joined to another, in order."""
        return sorted(self._parents)


def smallest_members(count: int, blocks: Iterable[NDArray[np.int64]]) -> NDArray[np.uint32]:
    """For each of `count` numbers the least one of its cluster; the rows of all blocks are the pairs that make the clusters."""
    smallest = np.arange(count, dtype=np.uint32)
    for pairs in blocks:
        block_clusters = Clusters(_find_roots(smallest, pairs).tolist())  # of a block's numbers only
        members = block_clusters.members()
        smallest[members] = [block_clusters.find(number) for number in members]
    for start in range(0, count, BLOCK_DOCUMENTS):
        _find_roots(smallest, np.arange(start, min(start + BLOCK_DOCUMENTS, count)))
    return smallest


def _find_roots(smallest: NDArray[np.uint32], numbers: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The least known member of the cluster of each number; the way there is short next time."""
    roots, parent = smallest[numbers], smallest[smallest[numbers]]
    while (roots != parent).any():
        roots, parent = parent, smallest[parent]
    smallest[numbers] = roots
    return roots


def keep_one_per_cluster(
    smallest: NDArray[np.uint32], chunks: Iterable[tuple[NDArray[np.int64], NDArray[np.int8]]]
) -> NDArray[np.bool_]:
    """Which documents stay, one of each cluster: one in train (side 0) before others, then the longest, then the first.

    `least` has the cluster of each; `pieces` have, one after another, the lengths and sides of all of them.
    """
    best, documents_done = np.zeros(len(smallest), np.uint64), 0
    for lengths, splits in chunks:
        numbers = np.arange(documents_done, documents_done + len(lengths), dtype=np.uint64)
        ranks = np.minimum(lengths, MAX_LENGTH).astype(np.uint64) << np.uint64(32) | NUMBER_MASK - numbers
        ranks |= (splits == 0).astype(np.uint64) << np.uint64(63)
        np.maximum.at(best, smallest[documents_done : documents_done + len(lengths)], ranks)
        documents_done += len(lengths)
    kept = np.zeros(len(smallest), np.bool_)
    for start in range(0, len(smallest), BLOCK_DOCUMENTS):
        kept_here = smallest[start : start + BLOCK_DOCUMENTS]
        kept[start : start + BLOCK_DOCUMENTS] = NUMBER_MASK - (best[kept_here] & NUMBER_MASK) == np.arange(
            start, start + len(kept_here), dtype=np.uint64
        )
    return kept
