"""Choose which duplicate to keep: exact duplicates by digest, near-duplicates by cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

DEFAULT_MEMORY = 512 << 20
"""Bytes that sorting may use."""
SORT_BYTES_PER_DIGEST = 64
"""Memory per digest while sorting."""
MIN_SORT_BYTES = 16 << 20
SORT_BYTES_PER_DOCUMENT = 16
"""Sorting may use the larger of this many bytes in total and this many per document."""
BLOCK_DOCUMENTS = 1 << 18
"""Documents processed at once."""
NUMBER_MASK = np.uint64(2**32 - 1)
"""The lower half of a rank holds the document number."""
MAX_LENGTH = 2**31 - 1
"""Longer documents count as this long: a rank has 31 bits for the length."""


def count_partitions(documents: int, row_bytes: int, memory: int) -> int:
    """The number of partitions to sort one at a time, so that each fits `memory`; a row takes `row_bytes`."""
    return 1 + documents * row_bytes // min(memory, max(MIN_SORT_BYTES, documents * SORT_BYTES_PER_DOCUMENT))


def exact_keep_masks(
    digests: Sequence[NDArray[np.uint8]], splits: Sequence[NDArray[np.int8]] | None = None, memory: int = DEFAULT_MEMORY
) -> list[NDArray[np.bool_]]:
    """For each chunk, which digests to keep: the first of equal ones, where one in train (split 0) comes first.

    If the digests do not fit `memory`, they are processed in partitions by value, with one pass over the chunks for
    each.
    """
    keep = [np.ones(len(rows), dtype=np.bool_) for rows in digests]
    partitions = count_partitions(sum(map(len, keep)), SORT_BYTES_PER_DIGEST, memory)
    for partition in range(partitions):
        rows_found = []
        chosen = [np.zeros((0, 2), np.uint64)]
        for rows in digests:
            halves = np.ascontiguousarray(rows).view(np.uint64).reshape(-1, 2)
            rows_found.append(np.flatnonzero(halves[:, 0] % np.uint64(partitions) == partition))
            chosen.append(halves[rows_found[-1]])
        halves = np.concatenate(chosen)
        keys = [halves[:, 1], halves[:, 0]]
        if splits is not None:
            keys.insert(0, np.concatenate([split[index] > 0 for split, index in zip(splits, rows_found, strict=True)]))
        order = np.lexsort(keys)  # stable sort: of equal digests, the first document comes first
        halves = halves[order]
        kept = np.ones(len(order), dtype=np.bool_)
        kept[order[1:][(halves[1:] == halves[:-1]).all(axis=1)]] = False
        for mask, index, kept_here in zip(
            keep, rows_found, np.split(kept, np.cumsum([len(index) for index in rows_found])[:-1]), strict=False
        ):
            mask[index] = kept_here
    return keep


class Clusters:
    """Disjoint sets of numbers (union-find); the smallest member identifies a cluster."""

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self._parents: dict[int, int] = {}
        for first, second in pairs:
            self.join(first, second)

    def find(self, number: int) -> int:
        """The smallest member of the cluster of `number`."""
        parents = self._parents
        root = number
        while (parent := parents.get(root, root)) != root:
            root = parent
        while number != root:  # path compression
            parents[number], number = root, parents[number]
        return root

    def join(self, first: int, second: int) -> None:
        """Merge the clusters of two numbers."""
        first = self.find(first)
        second = self.find(second)
        smallest = min(first, second)
        self._parents[first] = self._parents[second] = smallest

    def members(self) -> list[int]:
        """All numbers that were joined, sorted."""
        return sorted(self._parents)


def smallest_members(count: int, blocks: Iterable[NDArray[np.int64]]) -> NDArray[np.uint32]:
    """For each of `count` numbers, the smallest member of its cluster; the blocks hold the joined pairs."""
    smallest = np.arange(count, dtype=np.uint32)
    for pairs in blocks:
        block_clusters = Clusters(_find_roots(smallest, pairs).tolist())  # holds only the numbers of this block
        members = block_clusters.members()
        smallest[members] = [block_clusters.find(number) for number in members]
    for start in range(0, count, BLOCK_DOCUMENTS):
        _find_roots(smallest, np.arange(start, min(start + BLOCK_DOCUMENTS, count)))
    return smallest


def _find_roots(smallest: NDArray[np.uint32], numbers: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The root of each number, with path compression."""
    roots = smallest[numbers]
    parents = smallest[smallest[numbers]]
    while (roots != parents).any():
        roots = parents
        parents = smallest[parents]
    smallest[numbers] = roots
    return roots


def keep_one_per_cluster(
    smallest: NDArray[np.uint32], chunks: Iterable[tuple[NDArray[np.int64], NDArray[np.int8]]]
) -> NDArray[np.bool_]:
    """Keep one document per cluster: prefer train (split 0), then the longest, then the first.

    `smallest` has the cluster of each document. `chunks` has, in order, the lengths and splits of all of them.
    """
    best = np.zeros(len(smallest), np.uint64)
    documents_done = 0
    for lengths, splits in chunks:
        numbers = np.arange(documents_done, documents_done + len(lengths), dtype=np.uint64)
        ranks = np.minimum(lengths, MAX_LENGTH).astype(np.uint64) << np.uint64(32) | NUMBER_MASK - numbers
        ranks |= (splits == 0).astype(np.uint64) << np.uint64(63)
        np.maximum.at(best, smallest[documents_done : documents_done + len(lengths)], ranks)
        documents_done += len(lengths)
    kept = np.zeros(len(smallest), np.bool_)
    for start in range(0, len(smallest), BLOCK_DOCUMENTS):
        clusters = smallest[start : start + BLOCK_DOCUMENTS]
        kept[start : start + BLOCK_DOCUMENTS] = NUMBER_MASK - (best[clusters] & NUMBER_MASK) == np.arange(
            start, start + len(clusters), dtype=np.uint64
        )
    return kept
