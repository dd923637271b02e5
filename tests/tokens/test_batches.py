"""Batches are arithmetic: pure, sliced like the whole, every token asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from textmill.errors import TextmillError
from textmill.tokens.batches.ahead import ahead
from textmill.tokens.batches.order import order_of
from textmill.tokens.batches.packed import PackedBatches
from textmill.tokens.batches.windows import window_batches, window_count
from textmill.tokens.store import TokenStore, open_store
from textmill.tokens.writer import StoreWriter


def store_of(folder: Path, lengths: list[int]) -> TokenStore:
    """A store whose ids count up, so that every token is known by its id."""
    ids = np.arange(sum(lengths)) + 1
    with StoreWriter(folder / "s", np.dtype(np.int32)) as writer:
        writer.add(np.split(ids, np.cumsum(lengths)[:-1]))
    return open_store(folder / "s")


LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) >= 2)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, length=st.integers(1, 15), seed=st.integers(0, 2**62))
def test_an_epoch_asks_every_token_in_its_documents_order(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, seed: int
) -> None:
    store = store_of(tmp_path_factory.mktemp("packed"), lengths)
    batches = PackedBatches(store, length=length, batch=1, seed=seed)
    followers = {}
    asked = []
    for step in range(batches.windows):
        batch = batches.batch_at(step)
        assert batch.inputs.shape == batch.labels.shape == (1, length)
        assert (batch.inputs[0, 1:] == batch.labels[0, :-1]).all()
        asked += batch.labels[0].tolist()
        followers.update(zip(batch.inputs[0].tolist(), batch.labels[0].tolist(), strict=True))
    assert set(asked) == set(store.ids.tolist())
    ends = set(np.cumsum(lengths).tolist())
    for token, follower in followers.items():
        assert token in ends or follower == token + 1, "inside a document the next token follows"


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, step=st.integers(0, 10**9), cut=st.integers(0, 6))
def test_a_rank_sees_its_part_of_the_same_batch(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], step: int, cut: int) -> None:
    store = store_of(tmp_path_factory.mktemp("ranks"), lengths)
    whole = PackedBatches(store, length=5, batch=6, seed=9).batch_at(step)
    again = PackedBatches(store, length=5, batch=6, seed=9)
    for part in (slice(0, cut), slice(cut, 6)):
        mine = again.batch_at(step, part)
        assert (mine.inputs == whole.inputs[part]).all()
        assert (mine.samples == whole.samples[part]).all()
    assert whole.samples[0] == step * 6


def test_epochs_differ_and_seeds_differ(tmp_path: Path) -> None:
    store = store_of(tmp_path, [7] * 40)
    first = PackedBatches(store, length=7, batch=40, seed=1)
    assert (first.batch_at(0).inputs != first.batch_at(1).inputs).any()
    assert (first.batch_at(0).inputs != PackedBatches(store, length=7, batch=40, seed=2).batch_at(0).inputs).any()


def test_an_order_is_a_permutation_that_looks_random() -> None:
    order = order_of(10_000, 3, 4)
    assert sorted(order.tolist()) == list(range(10_000))
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05


def test_nothing_to_learn_from_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TextmillError, match="nothing to learn from"):
        PackedBatches(store_of(tmp_path, [1]), length=4, batch=1, seed=0)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, length=st.integers(1, 15), data=st.data(), batch=st.integers(1, 4))
def test_windows_ask_every_token_once_with_its_true_context(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, data: st.DataObject, batch: int
) -> None:
    stride = data.draw(st.integers(1, length))
    store = store_of(tmp_path_factory.mktemp("windows"), lengths)
    asked, windows = [], 0
    for one in window_batches(store, length=length, stride=stride, batch=batch, first=0):
        windows += len(one.inputs)
        for inputs, labels in zip(one.inputs, one.labels, strict=True):
            for place in np.flatnonzero(labels >= 0):
                asked.append(int(labels[place]))
                assert inputs[: place + 1].tolist() == list(range(labels[place] - 1 - place, labels[place])), "the tokens just before it"
    assert asked == store.ids.tolist()
    assert windows == window_count(store, length=length, stride=stride)


def test_ahead_gives_every_step_in_order_and_passes_errors_on(tmp_path: Path) -> None:
    batches = PackedBatches(store_of(tmp_path, [9, 9]), length=4, batch=2, seed=0)
    steps = list(ahead(batches.batch_at, 3, 9))
    assert [step for step, _ in steps] == [3, 4, 5, 6, 7, 8]
    assert all((batch.inputs == batches.batch_at(step).inputs).all() for step, batch in steps)
    with pytest.raises(ZeroDivisionError):
        next(ahead(lambda step: 1 // 0, 0, 1))  # type: ignore[arg-type, return-value]
