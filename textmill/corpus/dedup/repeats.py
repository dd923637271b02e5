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
    """For each chunk, its exact duplicates with the document of the same digest that is kept."""
    dropped = [rows[~mask] for rows, mask in zip(digests, keep, strict=True)]
    heads = np.unique(np.concatenate([_heads(rows) for rows in dropped]) if dropped else np.zeros(0, np.uint64))
    kept_at: dict[bytes, tuple[int, int]] = {}
    for chunk, mask in enumerate(keep):
        rows = digests[chunk]
        for row in np.flatnonzero(mask & np.isin(_heads(rows), heads)).tolist():
            kept_at[rows[row].tobytes()] = chunk, row
    repeats = []
    for rows, mask in zip(digests, keep, strict=True):
        places = np.flatnonzero(~mask).tolist()
        found = [(row, *kept_at[rows[row].tobytes()], 1.0, False) for row in places]
        repeats.append(np.array(found, REPEAT_DTYPE))
    return repeats


def find_near_repeats(
    confirmed: Sequence[Path], kept: NDArray[np.bool_], starts: NDArray[np.int64], keep: Sequence[NDArray[np.bool_]]
) -> list[NDArray[Any]]:
    """For each chunk, its near-duplicates with the most similar document, one that is kept if there is any.

    `kept`: by number over all chunks, of the documents left after exact deduplication; `starts`: each chunk's first.
    """
    pairs = np.concatenate([np.zeros(0, PAIR_DTYPE), *(np.fromfile(path, PAIR_DTYPE) for path in confirmed)])
    first, second = pairs["first"].astype(np.int64), pairs["second"].astype(np.int64)
    one, other = np.concatenate((first, second)), np.concatenate((second, first))
    similarity = np.concatenate((pairs["jaccard"], pairs["jaccard"])).astype(np.float32)
    is_dropped = ~kept[one]
    one, other, similarity = one[is_dropped], other[is_dropped], similarity[is_dropped]
    order = np.lexsort((other, -similarity, ~kept[other], one))
    one, other, similarity = one[order], other[order], similarity[order]
    chosen = np.flatnonzero(np.diff(one, prepend=-1))
    rows_of = [np.flatnonzero(mask) for mask in keep]
    repeats = [np.zeros(0, REPEAT_DTYPE) for _ in keep]
    chunk_of_one = np.searchsorted(starts, one[chosen], side="right") - 1
    for chunk in np.unique(chunk_of_one).tolist():
        places = chosen[chunk_of_one == chunk]
        found = np.zeros(len(places), REPEAT_DTYPE)
        found["row"] = rows_of[chunk][one[places] - starts[chunk]]
        found["chunk"] = np.searchsorted(starts, other[places], side="right") - 1
        found["other"] = [
            rows_of[where][number - starts[where]]
            for where, number in zip(found["chunk"].tolist(), other[places].tolist(), strict=True)
        ]
        found["similarity"], found["near"] = similarity[places], True
        repeats[chunk] = found
    return repeats


def _heads(digests: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(digests[:, :8]).view(np.uint64).reshape(-1)
