"""Pairs of context and continuation as rows of tokens: a context that several continuations share occurs once.

Shapes in names: N rows, T tokens of a row, M predicted tokens.
"""

from __future__ import annotations

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

    @property
    def tokens(self) -> int:
        """How many tokens the net reads: a continuation's last token is only predicted."""
        return len(self.context) + sum(len(branch) - 1 for branch in self.branches)


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
        known = tuple(context)[-(positions + 1 - len(continuation)) :] if context else (end,)
        branch = tuple(continuation)
        tree = growing.get(known)
        if tree is None or (branch not in tree.branches and tree.tokens + len(branch) - 1 > _limit(known)):
            tree = growing[known] = Tree(known)
            trees.append(tree)
        tree.branches.setdefault(branch, []).append(number)
    return sorted(trees, key=lambda tree: -tree.tokens)


def _limit(context: Ids) -> int:
    return max(TREE_TOKENS, TREE_CONTEXTS * len(context))


def pack(trees: Sequence[Tree], *, row_tokens: int, batch_tokens: int) -> Iterator[list[list[Tree]]]:
    """Divide trees into batches of rows; trees must come longest first.

    A row has at least `row_tokens` tokens of space, or as many as its longest tree; a batch has about `batch_tokens`.
    """
    rows: list[list[Tree]] = []
    space: list[int] = []
    length = 0
    for tree in trees:
        if not rows:
            length = max(row_tokens, tree.tokens)
        row = next((number for number, left in enumerate(space) if left >= tree.tokens), None)
        if row is None and rows and (len(rows) + 1) * length > batch_tokens:
            yield rows
            rows, space, length, row = [], [], max(row_tokens, tree.tokens), None
        if row is None:
            rows.append([])
            space.append(length)
            row = len(rows) - 1
        rows[row].append(tree)
        space[row] -= tree.tokens
    if rows:
        yield rows


def fill_rows(packed: list[list[Tree]], pad: int) -> Rows:
    """The arrays of a batch."""
    length = max(sum(tree.tokens for tree in row) for row in packed)
    ids, positions, trees, branches = (
        np.full((len(packed), length), value, np.int64) for value in (pad, 0, PADDING, CONTEXT)
    )
    places, labels, lengths, pairs = [], [], [], []
    for row, here in enumerate(packed):
        start = 0
        for number, tree in enumerate(here):
            context = len(tree.context)
            ids[row, start : start + context] = tree.context
            positions[row, start : start + context] = np.arange(context)
            trees[row, start : start + tree.tokens] = number
            last, start = row * length + start + context - 1, start + context
            for branch, (continuation, numbers) in enumerate(tree.branches.items(), 1):
                stop = start + len(continuation) - 1
                ids[row, start:stop] = continuation[:-1]
                positions[row, start:stop] = np.arange(context, context + stop - start)
                branches[row, start:stop] = branch
                places.append(np.concatenate([[last], np.arange(row * length + start, row * length + stop)]))
                labels.append(np.array(continuation, np.int64))
                lengths.append(len(continuation))
                pairs.append(numbers)
                start = stop
    return Rows(
        ids, positions, trees, branches, np.concatenate(places), np.concatenate(labels), np.cumsum(lengths), pairs
    )
