"""Pairs of context and continuation as rows of tokens: a context that several continuations share occurs once.

A multiple-choice question has one context and some choices. The pairs (context [5 6 7], choice [8 9]) and
([5 6 7], [3 4 2]) become one tree, and the tree one part of a row:

    ids        5  6  7  8  3  4     the last token of a choice is only predicted, so the net does not read it
    positions  0  1  2  3  3  4     as if each choice alone followed the context
    branch     0  0  0  1  2  2     0 is the context, which all branches may attend to (TreeAttention)
    predicts         8  9  4  2     the 7 predicts the first token of both choices: 8 and 3
                     3

`build_trees` groups the pairs, `pack` divides trees into rows and batches, `fill_rows` makes the arrays of a batch.

Shapes in names: N rows, T tokens of a row, M predicted tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from textmill.ranges import expand_ranges

Ids = tuple[int, ...]
CONTEXT = 0
"""The branch of context tokens; continuations are branches 1, 2 ..."""
PADDING = -1
"""The tree of padding tokens."""
TREE_TOKENS = 256
TREE_CONTEXTS = 4
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


def build_trees(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, first: int, positions: int, alone: bool = False
) -> list[Tree]:
    """Group pairs by context, or leave each `alone`; longest tree first.

    An empty context is the token `first`; one that does not fit into `positions` together with its continuation loses
    its first tokens."""
    trees: list[Tree] = []
    growing: dict[Ids, Tree] = {}
    for number, (context, continuation) in enumerate(pairs):
        space = positions + 1 - len(continuation)
        context_ids = tuple(context if len(context) <= space else context[-space:]) or (first,)
        branch = tuple(continuation)
        tree = growing.get(context_ids)
        if tree is None or alone or not _has_space(tree, branch):
            tree = growing[context_ids] = Tree(context_ids)
            trees.append(tree)
        tree.add(branch, number)
    return sorted(trees, key=lambda tree: -tree.tokens)


def _has_space(tree: Tree, branch: Ids) -> bool:
    limit = max(TREE_TOKENS, TREE_CONTEXTS * len(tree.context))
    return branch in tree.branches or tree.tokens + len(branch) - 1 <= limit


def pack(
    trees: Sequence[Tree], *, row_tokens: int, batch_tokens: int, alone: bool = False
) -> Iterator[list[list[Tree]]]:
    """Divide trees into batches of rows; trees must come longest first.

    A row has at least `row_tokens` tokens of space, or as many as its longest tree; a batch has about `batch_tokens`.
    A tree goes into the row with the least space that is enough, or `alone` into one of its own.
    """
    rows: list[list[Tree]] = []
    free: list[tuple[int, int]] = []  # the space left in a row, and its number; sorted
    length = 0
    for tree in trees:
        tokens = tree.tokens
        best_fit = bisect_left(free, (tokens, 0))
        if best_fit < len(free) and not alone:
            space, row = free.pop(best_fit)
        else:
            if rows and (len(rows) + 1) * length > batch_tokens:
                yield rows
                rows = []
                free = []
            length = length if rows else max(row_tokens, tokens)
            space = length
            row = len(rows)
            rows.append([])
        rows[row].append(tree)
        insort(free, (space - tokens, row))
    if rows:
        yield rows


class _Span(NamedTuple):
    """Consecutive tokens of a row: a context or a continuation."""

    place: int
    """Where it starts in the flat array of all tokens."""
    length: int
    position: int
    """The position of its first token in its own text."""
    tree: int
    branch: int


def fill_rows(packed: list[list[Tree]], pad: int) -> Rows:
    """The arrays of a batch."""
    length = max(sum(tree.tokens for tree in row) for row in packed)
    tokens: list[int] = []
    labels: list[int] = []
    spans: list[_Span] = []  # contexts and continuations
    predicted: list[tuple[int, int, int]] = []  # of a continuation: its context's last token, its first token, labels
    pairs: list[list[int]] = []
    for row, row_trees in enumerate(packed):
        start = row * length  # in the flat array of all tokens
        for tree_number, tree in enumerate(row_trees):
            context_length = len(tree.context)
            tokens += tree.context
            spans.append(_Span(start, context_length, 0, tree_number, CONTEXT))
            start += context_length
            context_end = start - 1
            for branch, (continuation, pair_numbers) in enumerate(tree.branches.items(), 1):
                count = len(continuation)
                tokens += continuation[:-1]
                labels += continuation
                spans.append(_Span(start, count - 1, context_length, tree_number, branch))
                predicted.append((context_end, start, count))
                pairs.append(pair_numbers)
                start += count - 1
    ids, positions, trees, branches = _fill_spans(np.array(spans), np.array(tokens), (len(packed), length), pad)
    context_ends, starts, counts = np.array(predicted).T
    ends = counts.cumsum()
    places = expand_ranges(starts - 1, counts)
    places[ends - counts] = context_ends  # a continuation's first token is predicted by its context's last one
    return Rows(ids, positions, trees, branches, places, np.array(labels), ends, pairs)


def _fill_spans(
    spans: NDArray[np.int64], tokens: NDArray[np.int64], shape: tuple[int, int], pad: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Ids, positions, trees and branches of rows; `spans` has a row for each _Span."""
    starts, counts, positions, trees, branches = spans.T
    places = expand_ranges(starts, counts)

    def fill(empty: int, values: NDArray[np.int64]) -> NDArray[np.int64]:
        array = np.full(shape, empty, np.int64)
        array.reshape(-1)[places] = values
        return array

    return (
        fill(pad, tokens),
        fill(0, expand_ranges(positions, counts)),
        fill(PADDING, np.repeat(trees, counts)),
        fill(CONTEXT, np.repeat(branches, counts)),
    )
