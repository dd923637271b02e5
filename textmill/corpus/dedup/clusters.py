"""Choose which duplicate to keep: exact duplicates by digest, near-duplicates by cluster."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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


class Clusters:
    """Disjoint sets of numbers (union-find); the smallest member identifies a cluster."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

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
