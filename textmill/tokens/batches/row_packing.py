"""Packs items of known lengths into rows of one length, so that little padding is left (histogram packing).

The work depends on the number of different lengths, not on the number of items.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Pattern = tuple[tuple[int, ...], int]
"""The lengths of the items in a row, and how many rows have these lengths."""


def pack_rows(lengths: NDArray[np.int64], longest: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(items in the order of their rows, where each row starts in that order and where the last one ends).

    Items of the lengths 5, 3, 2, 6, 1, 3 in rows of 8 -> items [0 1 | 3 2 | 5 4] (5 + 3, 6 + 2, 3 + 1), rows at
    [0 2 4 6].
    """
    counts = np.bincount(lengths, minlength=longest + 1)
    by_length = np.argsort(lengths, kind="stable")
    next_item = (np.cumsum(counts) - counts).tolist()  # of each length, as an index into `by_length`
    items = [np.zeros(0, np.int64)]
    items_per_row = [np.zeros(0, np.int64)]
    for pattern, rows in find_patterns(counts.tolist(), longest):
        columns = []
        for length in pattern:
            columns.append(by_length[next_item[length] : next_item[length] + rows])
            next_item[length] += rows
        items.append(np.stack(columns, axis=1).ravel())
        items_per_row.append(np.full(rows, len(pattern)))
    row_ends = np.cumsum(np.concatenate(items_per_row))
    return np.concatenate(items), np.concatenate([np.zeros(1, np.int64), row_ends])


def find_patterns(counts: list[int], longest: int) -> list[Pattern]:
    """How to combine counts[length] items of each length into rows: the longest first, into the fullest row that has
    space (best-fit decreasing)."""
    by_space: list[list[Pattern]] = [[] for _ in range(longest + 1)]
    for length in range(longest, 0, -1):
        left = counts[length]
        for space in range(length, longest):
            opened, by_space[space] = by_space[space], []
            for pattern, rows in opened:
                left, full = _fill(by_space, pattern, rows, space, length, left)
                if full < rows:
                    by_space[space].append((pattern, rows - full))
            if not left:
                break
        if left:
            each = longest // length
            _fill(by_space, (), -(-left // each), longest, length, left)
    return [pattern for patterns in by_space for pattern in patterns]


def _fill(
    by_space: list[list[Pattern]], pattern: tuple[int, ...], rows: int, space: int, length: int, left: int
) -> tuple[int, int]:
    """Put `left` items of a length into rows of a pattern, as many as fit into each; (items left, rows used)."""
    each = space // length
    used = min(rows, left // each)
    if used:
        by_space[space - each * length].append(((*pattern, *[length] * each), used))
        left -= used * each
    if left and used < rows and left < each:
        by_space[space - left * length].append(((*pattern, *[length] * left), 1))
        left = 0
        used = used + 1
    return left, used
