"""Which of the copies stays: exact duplicates by their digests, near-duplicates by the clusters that their pairs make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

MEMORY = 512 << 20
ROW = 64
"""Bytes that a digest takes while it is sorted."""
LITTLE, EACH = 16 << 20, 16
"""Bytes that sorting may always take, and for each document beyond that: little beside the passes that read text."""
BLOCK = 1 << 18
"""Documents that are looked at together."""
NUMBER = np.uint64(2**32 - 1)
LONGEST = 2**31 - 1


def parts_of(documents: int, row: int, memory: int) -> int:
    """How many parts to sort documents in, each of which takes `row` bytes: no more than `memory`, and far less for few documents."""
    return 1 + documents * row // min(memory, max(LITTLE, documents * EACH))


def keep_masks(
    digests: Sequence[NDArray[np.uint8]], sides: Sequence[NDArray[np.int8]] | None = None, memory: int = MEMORY
) -> list[NDArray[np.bool_]]:
    """For each shard's rows of 16 bytes, which ones stay: of equal ones the first, one of train (side 0) before all others.

    Where all of them do not fit into `memory`, those that begin alike are taken at a time, and the shards gone through again.
    """
    keep = [np.ones(len(rows), dtype=np.bool_) for rows in digests]
    parts = parts_of(sum(map(len, keep)), ROW, memory)
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
        for mask, index, here in zip(
            keep, found, np.split(stays, np.cumsum([len(index) for index in found])[:-1]), strict=False
        ):
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


def least_members(count: int, blocks: Iterable[NDArray[np.int64]]) -> NDArray[np.uint32]:
    """For each of `count` numbers the least one of its cluster; the rows of all blocks are the pairs that make the clusters."""
    least = np.arange(count, dtype=np.uint32)
    for pairs in blocks:
        small = Clusters(_roots(least, pairs).tolist())  # of a block's numbers only
        members = small.members()
        least[members] = [small.of(number) for number in members]
    for start in range(0, count, BLOCK):
        _roots(least, np.arange(start, min(start + BLOCK, count)))
    return least


def _roots(least: NDArray[np.uint32], numbers: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The least known member of the cluster of each number; the way there is short next time."""
    roots, higher = least[numbers], least[least[numbers]]
    while (roots != higher).any():
        roots, higher = higher, least[higher]
    least[numbers] = roots
    return roots


def stay_of_clusters(
    least: NDArray[np.uint32], pieces: Iterable[tuple[NDArray[np.int64], NDArray[np.int8]]]
) -> NDArray[np.bool_]:
    """Which documents stay, one of each cluster: one in train (side 0) before others, then the longest, then the first.

    `least` has the cluster of each; `pieces` have, one after another, the lengths and sides of all of them.
    """
    best, done = np.zeros(len(least), np.uint64), 0
    for lengths, sides in pieces:
        numbers = np.arange(done, done + len(lengths), dtype=np.uint64)
        ranks = np.minimum(lengths, LONGEST).astype(np.uint64) << np.uint64(32) | NUMBER - numbers
        ranks |= (sides == 0).astype(np.uint64) << np.uint64(63)
        np.maximum.at(best, least[done : done + len(lengths)], ranks)
        done += len(lengths)
    stays = np.zeros(len(least), np.bool_)
    for start in range(0, len(least), BLOCK):
        here = least[start : start + BLOCK]
        stays[start : start + BLOCK] = NUMBER - (best[here] & NUMBER) == np.arange(
            start, start + len(here), dtype=np.uint64
        )
    return stays
