"""Which of the copies stays: exact duplicates by their digests, near-duplicates by the clusters that their pairs make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

MEMORY = 512 << 20
ROW = 64
"""Bytes that a digest takes while it is sorted."""


def keep_masks(
    digests: Sequence[NDArray[np.uint8]], sides: Sequence[NDArray[np.int8]] | None = None, memory: int = MEMORY
) -> list[NDArray[np.bool_]]:
    """For each shard's rows of 16 bytes, which ones stay: of equal ones the first, one of train (side 0) before all others.

    Where all of them do not fit into `memory`, those that begin alike are taken at a time, and the shards gone through again.
    """
    keep = [np.ones(len(rows), dtype=np.bool_) for rows in digests]
    parts = 1 + sum(map(len, keep)) * ROW // memory
    for part in range(parts):
        found, chosen = [], [np.zeros((0, 2), np.uint64)]
        for rows in digests:
            halves = np.ascontiguousarray(rows).view(np.uint64).reshape(-1, 2)
            found.append(np.flatnonzero(halves[:, 0] % np.uint64(parts) == part))
            chosen.append(halves[found[-1]])
        halves = np.concatenate(chosen)
        keys = [halves[:, 1], halves[:, 0]]
        if sides is not None:
            keys.insert(0, np.concatenate([side[index] > 0 for side, index in zip(sides, found, strict=True)]))
        order = np.lexsort(keys)  # stable: among equals the first in canonical order comes first
        halves = halves[order]
        stays = np.ones(len(order), dtype=np.bool_)
        stays[order[1:][(halves[1:] == halves[:-1]).all(axis=1)]] = False
        for mask, index, here in zip(keep, found, np.split(stays, np.cumsum([len(index) for index in found])[:-1]), strict=False):
            mask[index] = here
    return keep


class Clusters:
    """Numbers joined into clusters, each known by its least member."""

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self._above: dict[int, int] = {}
        for one, other in pairs:
            self.join(one, other)

    def of(self, number: int) -> int:
        """The least member of the cluster of `number`."""
        above, root = self._above, number
        while (higher := above.get(root, root)) != root:
            root = higher
        while number != root:  # the way is short next time
            above[number], number = root, above[number]
        return root

    def join(self, one: int, other: int) -> None:
        """Make one cluster of two."""
        one, other = self.of(one), self.of(other)
        least = min(one, other)
        self._above[one] = self._above[other] = least

    def members(self) -> list[int]:
        """Every number that was joined to another, in order."""
        return sorted(self._above)


def drop_from_clusters(
    numbers: NDArray[np.int64], clusters: NDArray[np.int64], lengths: NDArray[np.int64], sides: NDArray[np.int8]
) -> NDArray[np.int64]:
    """All but one member of each cluster: one in train (side 0) stays before others, then the longest, then the first."""
    order = np.lexsort((numbers, -lengths, sides > 0, clusters))
    again = clusters[order[1:]] == clusters[order[:-1]]
    return np.sort(numbers[order[1:][again]])
