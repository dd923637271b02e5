"""Exact duplicates against a plain set, clusters against their definition, and their memory."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from textmill.config import CorpusConfig
from textmill.corpus import shards
from textmill.corpus.chunk_task import ChunkTask
from textmill.corpus.dedup.decisions import find_kept_equals, keep_one_per_cluster, smallest_members
from textmill.corpus.find_sources import find_sources, split_into_chunks
from textmill.corpus.prepare import clean_chunk

# Few different halves, so that rows often agree in one half only.
HALF = st.sampled_from([bytes(8), b"\x00" * 7 + b"\x01", b"\xff" * 8, b"\x01" + bytes(7)])
ROW = st.tuples(HALF, HALF).map(b"".join)


def array_of(rows: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 16)


@given(st.lists(ROW, max_size=60))
def test_first_duplicate_is_kept(rows: list[bytes]) -> None:
    kept = find_kept_equals(array_of(rows), np.zeros(len(rows), np.int8))
    assert kept.tolist() == [rows.index(row) for row in rows]


def test_many_digests() -> None:
    numbers = np.random.default_rng(7).integers(0, 50_000, 200_000).astype(np.uint64)
    rows = np.stack([numbers * np.uint64(0x9E3779B97F4A7C15), numbers], axis=1).view(np.uint8).reshape(-1, 16)
    kept = find_kept_equals(rows, np.zeros(len(rows), np.int8))
    _, first, group = np.unique(numbers, return_index=True, return_inverse=True)
    assert np.array_equal(kept, first[group])


@given(st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), max_size=30))
def test_clusters_of_pairs(pairs: list[tuple[int, int]]) -> None:
    """Compared with sets that are merged until nothing changes."""
    groups = [{number} for number in range(15)]
    for pair in pairs:
        touched = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if not group & set(pair)] + [set().union(*touched)]
    least = smallest_members(15, *np.array(pairs, np.int64).reshape(-1, 2).T)
    assert least.tolist() == [min(group) for number in range(15) for group in groups if number in group]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(0, 2)), max_size=30))
def test_kept_document_of_a_cluster(rows: list[tuple[int, int, int]]) -> None:
    least = [min(number for number, other in enumerate(rows) if other[0] == row[0]) for row in rows]
    kept = keep_one_per_cluster(
        np.array(least, np.int64), np.array([row[1] for row in rows], np.int64), np.array([r[2] for r in rows], np.int8)
    )
    best = {
        min((row[2] > 0, -row[1], number) for number, row in enumerate(rows) if row[0] == cluster)[2]
        for cluster, _, _ in rows
    }
    assert set(np.flatnonzero(kept).tolist()) == best


def peak_memory(function: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.long
def test_memory_of_reading_is_constant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be split is one chunk, however long it is."""
    monkeypatch.setattr(shards, "BUFFER_CHARACTERS", 1 << 14)
    monkeypatch.setattr("textmill.corpus.shards.GROUP_BYTES", 1 << 14)
    peaks = []
    for count in (10, 9_000, 18_000):  # what is imported is counted for the first
        folder = tmp_path / str(count)
        (folder / "work").mkdir(parents=True)
        with gzip.open(folder / "texts.jsonl.gz", "wt") as stream:
            stream.writelines(json.dumps({"text": f"{number:500}"}) + "\n" for number in range(count))
        config = CorpusConfig(sources=[str(folder / "texts.jsonl.gz")])
        (chunk,) = split_into_chunks(find_sources(config.sources), config.documents)
        task = ChunkTask(0, (chunk,), ("texts",), config, folder)
        peaks.append(peak_memory(lambda task=task: clean_chunk(task)))  # type: ignore[misc]
        assert len(task.read_digests()) == count
    assert peaks[2] < peaks[1] + 9_000 * 16
