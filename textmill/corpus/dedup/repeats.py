"""Find, for each dropped duplicate, the document that it repeats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.corpus.dedup.near_duplicates import PAIR_DTYPE
from textmill.corpus.dropped import REPEAT_DTYPE


def find_exact_repeats(digests: Sequence[NDArray[np.uint8]], keep: Sequence[NDArray[np.bool_]]) -> list[NDArray[Any]]:
    """For each chunk, its exact duplicates with the document of the same digest that is kept.

    `keep`: for each chunk, which documents exact deduplication keeps.
    """
    dropped = [rows[~mask] for rows, mask in zip(digests, keep, strict=True)]
    prefixes = np.unique(np.concatenate([np.zeros(0, np.uint64), *map(_prefixes, dropped)]))
    kept_by_digest: dict[bytes, tuple[int, int]] = {}  # the chunk and the row; only where a duplicate is likely
    for chunk, mask in enumerate(keep):
        rows = digests[chunk]
        for row in np.flatnonzero(mask & np.isin(_prefixes(rows), prefixes)).tolist():
            kept_by_digest[rows[row].tobytes()] = chunk, row
    repeats = []
    for rows, mask in zip(digests, keep, strict=True):
        dropped_rows = np.flatnonzero(~mask).tolist()
        entries = [(row, *kept_by_digest[rows[row].tobytes()], 1.0, False) for row in dropped_rows]
        repeats.append(np.array(entries, REPEAT_DTYPE))
    return repeats


def find_near_repeats(
    pair_files: Sequence[Path],
    is_kept: NDArray[np.bool_],
    starts: NDArray[np.int64],
    masks: Sequence[NDArray[np.bool_]],
) -> list[NDArray[Any]]:
    """For each chunk, its near-duplicates with the most similar document, one that is kept if there is any.

    `is_kept`: by number over all chunks, of the documents left after exact deduplication; `starts`: the number of each
    chunk's first; `masks`: which documents of a chunk are left after exact deduplication.
    """
    pairs = np.concatenate([np.zeros(0, PAIR_DTYPE), *(np.fromfile(path, PAIR_DTYPE) for path in pair_files)])
    document, other, similarity = _best_matches(pairs, is_kept)
    row_of = np.concatenate([np.flatnonzero(mask) for mask in masks])  # in its chunk, by number
    repeats = np.zeros(len(document), REPEAT_DTYPE)
    repeats["row"] = row_of[document]
    repeats["chunk"] = np.searchsorted(starts, other, side="right") - 1
    repeats["other"] = row_of[other]
    repeats["similarity"], repeats["near"] = similarity, True
    return np.split(repeats, np.searchsorted(document, starts[1:]))


def _best_matches(
    pairs: NDArray[Any], is_kept: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Each dropped document of a pair, in order, with its best match and how similar it is."""
    first = pairs["first"].astype(np.int64)
    second = pairs["second"].astype(np.int64)
    # Each pair in both directions, then only those from a dropped document to another.
    document = np.concatenate((first, second))
    other = np.concatenate((second, first))
    similarity = np.concatenate((pairs["jaccard"], pairs["jaccard"])).astype(np.float32)
    is_dropped = ~is_kept[document]
    document = document[is_dropped]
    other = other[is_dropped]
    similarity = similarity[is_dropped]
    # By document; its best match comes first: kept, then most similar, then first in the corpus.
    order = np.lexsort((other, -similarity, ~is_kept[other], document))
    best = order[np.flatnonzero(np.diff(document[order], prepend=-1))]
    return document[best], other[best], similarity[best]


def _prefixes(digests: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """The first eight bytes of each digest, as a number."""
    return np.ascontiguousarray(digests[:, :8]).view(np.uint64).reshape(-1)
