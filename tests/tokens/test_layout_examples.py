"""The examples in the docstrings of the layouts are what the layouts build."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from textmill.tokens.batches.blend import BatchSizes, Blend, DataRange, blends_of, sizes_of
from textmill.tokens.batches.chat import ChatLayout
from textmill.tokens.batches.masked import pack_rows
from textmill.tokens.batches.packed import PackedLayout, window_batches
from textmill.tokens.batches.padded import PaddedLayout
from textmill.tokens.store import StoreWriter, TokenStore, open_store

NONE, PAD = -100, 99


def write_store(folder: Path, *documents: list[int]) -> TokenStore:
    with StoreWriter(folder / "s", np.dtype(np.int32)) as writer:
        writer.add([np.array(document) for document in documents])
    return open_store(folder / "s")


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return write_store(tmp_path, [1, 2, 3, 0], [4, 5, 0], [6, 7, 8, 9, 0])


def test_packed(store: TokenStore) -> None:
    arrays = PackedLayout(store, length=4, seed=None).build_samples(np.arange(3))
    assert arrays.inputs.tolist() == [[1, 2, 3, 0], [4, 5, 0, 6], [7, 8, 9, 0]]
    assert arrays.labels.tolist() == [[2, 3, 0, 4], [5, 0, 6, 7], [8, 9, 0, NONE]]
    isolated = PackedLayout(store, length=4, seed=None, isolate_documents=True).build_samples(np.arange(3))
    assert isolated.labels.tolist() == [[2, 3, 0, NONE], [5, 0, NONE, 7], [8, 9, 0, NONE]]
    assert isolated.documents is not None
    assert isolated.documents.tolist() == [[1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 1, 1]]


def test_padded(store: TokenStore) -> None:
    arrays = PaddedLayout(store, length=4, seed=None, pad_id=PAD).build_samples(np.arange(3))
    assert arrays.inputs.tolist() == [[1, 2, 3, 0], [4, 5, 0, PAD], [6, 7, 8, 9]]
    assert arrays.labels.tolist() == [[2, 3, 0, NONE], [5, 0, NONE, NONE], [7, 8, 9, 0]]


def test_chat(tmp_path: Path) -> None:
    conversations = write_store(tmp_path, [1, 2, 3, 0], [4, 5, 0])
    masked = replace(conversations, loss_mask=np.array([0, 0, 1, 1, 0, 1, 1], np.uint8))
    arrays = ChatLayout(masked, length=6, seed=None, pad_id=PAD).build_samples(np.arange(1))
    assert arrays.inputs.tolist() == [[1, 2, 3, 4, 5, PAD]]
    assert arrays.labels.tolist() == [[NONE, 3, 0, 5, 0, NONE]]
    assert arrays.documents is not None
    assert arrays.documents.tolist() == [[1, 1, 1, 2, 2, 0]]


def test_windows(tmp_path: Path) -> None:
    (batch,) = window_batches(write_store(tmp_path, [1, 2, 3, 4, 5, 6]), length=4, stride=2, batch=8, first_input=0)
    assert batch.inputs.tolist() == [[0, 1, 2, 3], [2, 3, 4, 5]]
    assert batch.labels.tolist() == [[1, 2, 3, 4], [NONE, NONE, 5, 6]]


def test_sizes_and_blends() -> None:
    phases = BatchSizes(8, (2, 2, 24)).phases
    assert [(phase.step, phase.sample, phase.size) for phase in phases] == [
        (0, 0, 2),
        (4, 8, 4),
        (6, 16, 6),
        (8, 28, 8),
    ]
    stores, numbers = Blend([3, 1]).locate(np.arange(8))
    assert stores.tolist() == [0, 1, 0, 0, 0, 1, 0, 0]
    assert (stores[5], numbers[5]) == (1, 1)
    ranges = [
        DataRange(0, 10, (), [("a", 1.0)]),
        DataRange(10, 10, (), [("a", 1.0), ("b", 1.0)]),
        DataRange(20, 10, (), [("b", 1.0)]),
    ]
    blends = blends_of(ranges, sizes_of(ranges))
    assert [(one.sample, one.layouts, one.taken) for one in blends] == [
        (0, [None], [0]),
        (100, [None, 0], [100, 0]),
        (200, [0], [50]),
    ]


def test_packed_rows() -> None:
    items, starts = pack_rows(np.array([5, 3, 2, 6, 1, 3]), 8)
    assert (items.tolist(), starts.tolist()) == ([0, 1, 3, 2, 5, 4], [0, 2, 4, 6])
