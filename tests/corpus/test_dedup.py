"""Exact duplicates against a plain set."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from textmill.corpus.dedup import keep_masks

# Few different halves, so that rows often agree in one half only.
HALF = st.sampled_from([bytes(8), b"\x00" * 7 + b"\x01", b"\xff" * 8, b"\x01" + bytes(7)])
ROW = st.tuples(HALF, HALF).map(b"".join)


def array_of(rows: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 16)


@given(st.lists(st.lists(ROW, max_size=12), max_size=6))
def test_first_in_order_stays(shards: list[list[bytes]]) -> None:
    seen: set[bytes] = set()
    expected = []
    for shard in shards:
        expected.append([row not in seen and not seen.add(row) for row in shard])  # type: ignore[func-returns-value]
    assert [mask.tolist() for mask in keep_masks([array_of(shard) for shard in shards])] == expected


def test_many() -> None:
    numbers = np.random.default_rng(7).integers(0, 50_000, 200_000).astype(np.uint64)
    rows = np.stack([numbers * np.uint64(0x9E3779B97F4A7C15), numbers], axis=1).view(np.uint8).reshape(-1, 16)
    (mask,) = keep_masks([rows])
    assert sorted(np.flatnonzero(mask)) == sorted(np.unique(numbers, return_index=True)[1])
