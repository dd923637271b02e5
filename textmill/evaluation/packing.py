"""Pairs of context and continuation as rows of tokens: a context that several continuations share occurs once.

Shapes in names: N rows, T tokens of a row, M predicted tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ids = tuple[int, ...]
CONTEXT = 0
"""The branch of context tokens; continuations are branches 1, 2 ..."""
PADDING = -1
"""The tree of padding tokens."""
TREE_TOKENS, TREE_CONTEXTS = 256, 4
"""A tree grows up to this many tokens, or this many times its context: attention is quadratic in its size, so sharing
a short context among many continuations would cost more than it saves."""


@dataclass
class Tree:
    """A context and the continuations that follow it, each with the numbers of its pairs."""

    context: Ids
    branches: dict[Ids, list[int]] = field(default_factory=dict)
    tokens: int = field(init=False)
    """How many tokens the net reads: a continuation's last token is only predicted."""

    def __post_init__(self) -> None:
        self.tokens = len(self.context) + sum(len(branch) - 1 for branch in self.branches)

    def add(self, branch: Ids, number: int) -> None:
        """Add a pair's continuation."""
        if branch not in self.branches:
            self.tokens += len(branch) - 1
        self.branches.setdefault(branch, []).append(number)


@dataclass(frozen=True)
class Rows:
    """The input of one forward pass, and where each predicted token is."""

    ids_NT: NDArray[np.int64]
    positions_NT: NDArray[np.int64]
    """The position of each token in its own text."""
    trees_NT: NDArray[np.int64]
    """Which tree each token belongs to."""
    branches_NT: NDArray[np.int64]
    places_M: NDArray[np.int64]
    """Where each predicted token is predicted: an index into the flat array of all tokens."""
    labels_M: NDArray[np.int64]
    ends: NDArray[np.int64]
    """Where each continuation ends in the M predicted tokens."""
    pairs: list[list[int]]
    """The numbers of the pairs of each continuation."""

    @property
    def is_causal(self) -> bool:
        """Whether each row is one plain text, so that causal attention needs no mask."""
        return not self.trees_NT.max(initial=0) and self.branches_NT.max(initial=0) <= 1


def build_trees(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, end: int, positions: int) -> list[Tree]:
    """Group pairs by context, longest tree first. An empty context is the token `end`; one that does not fit into
    `positions` together with its continuation loses its first tokens."""
    trees: list[Tree] = []
    growing: dict[Ids, Tree] = {}
    for number, (context, continuation) in enumerate(pairs):
        space = positions + 1 - len(continuation)
        known = tuple(context if len(context) <= space else context[-space:]) or (end,)
        branch = tuple(continuation)
        tree = growing.get(known)
        if tree is None or (branch not in tree.branches and tree.tokens + len(branch) - 1 > _limit(known)):
            tree = growing[known] = Tree(known)
            trees.append(tree)
        tree.add(branch, number)
    return sorted(trees, key=lambda tree: -tree.tokens)


def _limit(context: Ids) -> int:
    return max(TREE_TOKENS, TREE_CONTEXTS * len(context))


def pack(trees: Sequence[Tree], *, row_tokens: int, batch_tokens: int) -> Iterator[list[list[Tree]]]:
    """Divide trees into batches of rows; trees must come longest first.

    A row has at least `row_tokens` tokens of space, or as many as its longest tree; a batch has about `batch_tokens`.
    A tree goes into the row with the least space that is enough.
    """
    rows: list[list[Tree]] = []
    free: list[tuple[int, int]] = []  # the space left in a row, and its number; sorted
    length = 0
    for tree in trees:
        tokens = tree.tokens
        found = bisect_left(free, (tokens, 0))
        if found < len(free):
            space, row = free.pop(found)
        else:
            if rows and (len(rows) + 1) * length > batch_tokens:
                yield rows
                rows, free = [], []
            length = length if rows else max(row_tokens, tokens)
            space, row = length, len(rows)
            rows.append([])
        rows[row].append(tree)
        insort(free, (space - tokens, row))
    if rows:
        yield rows


def fill_rows(packed: list[list[Tree]], pad: int) -> Rows:
    """The arrays of a batch."""
    length = max(sum(tree.tokens for tree in row) for row in packed)
    tokens: list[int] = []
    labels: list[int] = []
    pieces: list[tuple[int, int, int, int, int]] = []  # contexts and continuations: see _write_pieces
    predicted: list[tuple[int, int, int]] = []  # of a continuation: its context's last token, its first token, labels
    pairs: list[list[int]] = []
    for row, here in enumerate(packed):
        start = row * length
        for number, tree in enumerate(here):
            context = len(tree.context)
            tokens += tree.context
            pieces.append((start, context, 0, number, CONTEXT))
            start += context
            last = start - 1
            for branch, (continuation, numbers) in enumerate(tree.branches.items(), 1):
                count = len(continuation)
                tokens += continuation[:-1]
                labels += continuation
                pieces.append((start, count - 1, context, number, branch))
                predicted.append((last, start, count))
                pairs.append(numbers)
                start += count - 1
    ids, positions, trees, branches = _write_pieces(np.array(pieces), np.array(tokens), (len(packed), length), pad)
    lasts, starts, counts = np.array(predicted).T
    ends = counts.cumsum()
    places = np.repeat(starts - 1, counts) + _count_up(counts)
    places[ends - counts] = lasts
    return Rows(ids, positions, trees, branches, places, np.array(labels), ends, pairs)


def _write_pieces(
    pieces: NDArray[np.int64], tokens: NDArray[np.int64], shape: tuple[int, int], pad: int
) -> list[NDArray[np.int64]]:
    """Ids, positions, trees and branches of rows, from each piece's place, length, first position, tree and branch."""
    starts, counts, positions, trees, branches = pieces.T
    within = _count_up(counts)
    at = np.repeat(starts, counts) + within
    filled: list[NDArray[np.int64]] = []
    for empty, values in (
        (pad, tokens),
        (0, np.repeat(positions, counts) + within),
        (PADDING, np.repeat(trees, counts)),
        (CONTEXT, np.repeat(branches, counts)),
    ):
        array = np.full(shape, empty, np.int64)
        array.reshape(-1)[at] = values
        filled.append(array)
    return filled


def _count_up(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1 ... for each count, one after the other."""
    return np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
