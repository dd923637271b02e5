"""Pairs of context and continuation as rows of tokens: a context that several continuations share occurs once.

A multiple-choice question has one context and some choices. The pairs (context [5 6 7], choice [8 9]) and
([5 6 7], [3 4 2]) become one tree, and the tree one part of a row:

    ids        5  6  7  8  3  4     the last token of a choice is only predicted, so the net does not read it
    positions  0  1  2  3  3  4     as if each choice alone followed the context
    last       5  5  5  3  5  5     the last token in the row that attends to this one (TreeAttention)
    predicts         8  9  4  2     the 7 predicts the first token of both choices: 8 and 3
                     3

Questions after the same examples become children of one tree, whose context is what their prompts have in common.

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

from textmill.ranges import count_common, expand_ranges

Ids = tuple[int, ...]
SHARED_TOKENS = 32
"""Contexts share a beginning that is at least so long."""
TREE_TOKENS = 256
TREE_CONTEXTS = 4
"""A tree grows up to this many tokens, or this many times its context: attention is quadratic in its size, so sharing
a short context among many continuations would cost more than it saves."""
MAX_JOINED_TOKENS = 4096
"""At most, for trees that share a beginning: the mask of a row has the square of so many values."""


@dataclass
class Tree:
    """A context and the continuations that follow it, each with the numbers of its pairs; or the common beginning of
    several contexts, whose trees are its children."""

    context: Ids
    branches: dict[Ids, list[int]] = field(default_factory=dict)
    children: list[Tree] = field(default_factory=list)
    tokens: int = field(init=False)
    """How many tokens the net reads: a continuation's last token is only predicted."""

    def __post_init__(self) -> None:
        self.tokens = len(self.context) + sum(child.tokens for child in self.children)

    @property
    def texts(self) -> int:
        """How many pairs it has."""
        return sum(map(len, self.branches.values())) + sum(child.texts for child in self.children)

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
    last_NT: NDArray[np.int64]
    """The last token of the row that attends to each token."""
    is_causal: bool
    """Whether each row is one plain text, so that causal attention needs no mask."""
    places_M: NDArray[np.int64]
    """Where each predicted token is predicted: an index into the flat array of all tokens."""
    labels_M: NDArray[np.int64]
    ends: NDArray[np.int64]
    """Where each continuation ends in the M predicted tokens."""
    pairs: list[list[int]]
    """The numbers of the pairs of each continuation."""


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
    return sorted(trees if alone else _join_trees(trees), key=lambda tree: -tree.tokens)


def _has_space(tree: Tree, branch: Ids) -> bool:
    limit = max(TREE_TOKENS, TREE_CONTEXTS * len(tree.context))
    return branch in tree.branches or tree.tokens + len(branch) - 1 <= limit


def _join_trees(trees: Sequence[Tree]) -> list[Tree]:
    """Make trees whose contexts begin alike children of one, each time with the latest ones that begin so."""
    groups: list[_Group] = []
    latest: dict[Ids, _Group] = {}
    for tree in trees:
        beginning = tree.context[:SHARED_TOKENS]
        group = latest.get(beginning)
        if group is None or len(beginning) < SHARED_TOKENS or not group.add(tree):
            group = latest[beginning] = _Group([tree], tree.context, tree.tokens)
            groups.append(group)
    return [group.join() for group in groups]


@dataclass
class _Group:
    """Trees whose contexts begin with the same tokens."""

    trees: list[Tree]
    shared: Ids
    tokens: int
    """The sum of the trees' tokens."""

    def add(self, tree: Tree) -> bool:
        """Add a tree if that saves tokens and the whole is not too large."""
        count = len(self.trees)
        shared = self.shared
        if tree.context[: len(shared)] != shared:
            shared = shared[: count_common(shared, tree.context)]
        tokens = self.tokens + tree.tokens
        saves = len(shared) * count > len(self.shared) * (count - 1)
        limit = min(max(TREE_TOKENS, TREE_CONTEXTS * len(shared)), MAX_JOINED_TOKENS)
        if not saves or tokens - len(shared) * count > limit:
            return False
        self.trees.append(tree)
        self.shared = shared
        self.tokens = tokens
        return True

    def join(self) -> Tree:
        """One tree."""
        if len(self.trees) == 1:
            return self.trees[0]
        for tree in self.trees:
            tree.context = tree.context[len(self.shared) :]
            tree.tokens -= len(self.shared)
        return Tree(self.shared, children=self.trees)


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
    last: int
    """The last token that attends to it, in the flat array of all tokens."""


def fill_rows(packed: list[list[Tree]], pad: int) -> Rows:
    """The arrays of a batch."""
    used = np.array([sum(tree.tokens for tree in row) for row in packed])
    length = int(used.max())
    tokens: list[int] = []
    labels: list[int] = []
    spans: list[_Span] = []  # contexts and continuations
    predicted: list[tuple[int, int, int]] = []  # of a continuation: its context's last token, its first token, labels
    pairs: list[list[int]] = []

    def add(tree: Tree, start: int, position: int, context_end: int) -> None:
        """Add a tree at `start` in the flat array; before its context are `position` tokens of others, the last of them
        at `context_end`."""
        tokens.extend(tree.context)
        spans.append(_Span(start, len(tree.context), position, start + tree.tokens - 1))
        start += len(tree.context)
        position += len(tree.context)
        context_end = start - 1 if tree.context else context_end
        for continuation, pair_numbers in tree.branches.items():
            count = len(continuation)
            tokens.extend(continuation[:-1])
            labels.extend(continuation)
            spans.append(_Span(start, count - 1, position, start + count - 2))
            predicted.append((context_end, start, count))
            pairs.append(pair_numbers)
            start += count - 1
        for child in tree.children:
            add(child, start, position, context_end)
            start += child.tokens

    for row, row_trees in enumerate(packed):
        start = row * length
        for tree in row_trees:
            add(tree, start, 0, -1)
            start += tree.tokens
    places, lengths, positions, lasts = np.array(spans).T
    token_places = expand_ranges(places, lengths)
    lasts_T = np.repeat(lasts, lengths) % length

    def fill(empty: int, values: NDArray[np.int64]) -> NDArray[np.int64]:
        array = np.full((len(packed), length), empty, np.int64)
        array.reshape(-1)[token_places] = values
        return array

    is_causal = bool((lasts_T == np.repeat(used, used) - 1).all())
    ids_NT = fill(pad, np.array(tokens))
    positions_NT = fill(0, expand_ranges(positions, lengths))
    context_ends, starts, counts = np.array(predicted).T
    ends = counts.cumsum()
    places_M = expand_ranges(starts - 1, counts)
    places_M[ends - counts] = context_ends  # a continuation's first token is predicted by its context's last one
    last_NT = fill(length - 1, lasts_T)
    return Rows(ids_NT, positions_NT, last_NT, is_causal, places_M, np.array(labels), ends, pairs)
