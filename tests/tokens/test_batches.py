"""Batches are pure functions of the step; slices equal the whole, and every token has loss once."""

from __future__ import annotations

import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from textmill.config import TokenizerConfig, TrainConfig
from textmill.errors import TextmillError
from textmill.tokens.batches import batch as sums
from textmill.tokens.batches.batch import IGNORED, check_ids, permute
from textmill.tokens.batches.blend import Blend, DataRange
from textmill.tokens.batches.loader import Batches, batches_in_order, valid_batches
from textmill.tokens.batches.packed import PackedLayout, count_windows, window_batches
from textmill.tokens.batches.padded import PaddedLayout
from textmill.tokens.splits import Splits, WeightedStore
from textmill.tokens.store import StoreWriter, TokenStore, open_store, store_paths
from textmill.tokens.vocabulary.tokenizer import fit


def store_of(folder: Path, lengths: list[int]) -> TokenStore:
    """A store whose ids count up, so that the id tells which token it is."""
    ids = np.arange(sum(lengths)) + 1
    with StoreWriter(folder / "s", np.dtype(np.int32)) as writer:
        writer.add(np.split(ids, np.cumsum(lengths)[:-1]))
    return open_store(folder / "s")


def packed_batches(store: TokenStore, *, batch: int, **options: Any) -> Batches:
    return Batches([PackedLayout(store, **options)], ranges_of(batch))


def ranges_of(batch: int, *weights: float) -> list[DataRange]:
    return [DataRange(0, batch, (), [("", weight) for weight in weights or [1.0]])]


LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) >= 2)


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, length=st.integers(1, 15), seed=st.integers(0, 2**62))
def test_an_epoch_has_loss_on_every_token_in_document_order(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, seed: int
) -> None:
    store = store_of(tmp_path_factory.mktemp("packed"), lengths)
    packed = PackedLayout(store, length=length, seed=seed)
    batches = Batches([packed], ranges_of(1))
    followers = {}
    predicted = []
    for step in range(packed.samples_per_epoch):
        batch = batches.batch_at(step)
        assert batch.inputs.shape == batch.labels.shape == (1, length)
        assert (batch.inputs[0, 1:] == batch.labels[0, :-1]).all()
        predicted += batch.labels[0].tolist()
        followers.update(zip(batch.inputs[0].tolist(), batch.labels[0].tolist(), strict=True))
    assert set(predicted) == set(store.ids.tolist())
    ends = set(np.cumsum(lengths).tolist())
    for token, follower in followers.items():
        assert token in ends or follower == token + 1, "inside a document the next token follows"


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, step=st.integers(0, 10**9), cut=st.integers(0, 6))
def test_a_rank_gets_its_slice_of_the_global_batch(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], step: int, cut: int
) -> None:
    store = store_of(tmp_path_factory.mktemp("ranks"), lengths)
    whole = packed_batches(store, length=5, batch=6, seed=9).batch_at(step)
    again = packed_batches(store, length=5, batch=6, seed=9)
    for part in (slice(0, cut), slice(cut, 6)):
        mine = again.batch_at(step, part)
        assert (mine.inputs == whole.inputs[part]).all()
        assert (mine.samples == whole.samples[part]).all()
    assert whole.samples[0] == step * 6


def test_epochs_and_seeds_give_different_orders(tmp_path: Path) -> None:
    store = store_of(tmp_path, [7] * 40)
    first = packed_batches(store, length=7, batch=40, seed=1)
    assert (first.batch_at(0).inputs != first.batch_at(1).inputs).any()
    assert (first.batch_at(0).inputs != packed_batches(store, length=7, batch=40, seed=2).batch_at(0).inputs).any()


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 3000), numbers=st.tuples(st.integers(0, 2**62), st.integers(0, 99)))
def test_a_shuffle_is_a_permutation(count: int, numbers: tuple[int, int]) -> None:
    assert sorted(permute(count, np.arange(count), *numbers).tolist()) == list(range(count))


def evenly(counts: Any) -> bool:
    """Whether counts look uniform: chi-square within five standard deviations of its mean."""
    counts = np.asarray(counts, float)
    free, found = len(counts) - 1, float(((counts - counts.mean()) ** 2).sum() / counts.mean())
    return abs(found - free) < 5 * (2 * free) ** 0.5


def test_shuffles_look_random() -> None:
    """Chi-square: all permutations of four are about equally frequent; neighbours end up as distant as any two."""
    seen = Counter(tuple(permute(4, np.arange(4), seed).tolist()) for seed in range(4_800))
    assert len(seen) == 24
    assert evenly(list(seen.values()))
    distances = np.zeros(499)
    for seed in range(120):
        order = permute(500, np.arange(500), seed, 7)
        distances += np.bincount((np.diff(order) % 500) - 1, minlength=499)
    assert evenly(distances)
    big = permute(1_000_003, np.arange(1_000_003), 5)
    assert abs(np.corrcoef(big, np.arange(len(big)))[0, 1]) < 0.005
    assert abs(np.corrcoef(big[1:], big[:-1])[0, 1]) < 0.005


def test_too_few_tokens_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(TextmillError, match="too few to train on"):
        packed_batches(store_of(tmp_path, [1]), length=4, batch=1, seed=0)


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, length=st.integers(1, 15), data=st.data(), batch=st.integers(1, 4))
def test_windows_predict_every_token_once_with_the_right_context(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, data: st.DataObject, batch: int
) -> None:
    stride = data.draw(st.integers(1, length))
    store = store_of(tmp_path_factory.mktemp("windows"), lengths)
    predicted, windows = [], 0
    for one in window_batches(store, length=length, stride=stride, batch=batch, first_input=0):
        windows += len(one.inputs)
        for inputs, labels in zip(one.inputs, one.labels, strict=True):
            for place in np.flatnonzero(labels >= 0):
                predicted.append(int(labels[place]))
                assert inputs[: place + 1].tolist() == list(range(labels[place] - 1 - place, labels[place])), (
                    "the tokens just before it"
                )
    assert predicted == store.ids.tolist()
    assert windows == count_windows(store, length=length, stride=stride)


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, length=st.integers(1, 15), seed=st.integers(0, 99))
def test_isolated_documents(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, seed: int
) -> None:
    store = store_of(tmp_path_factory.mktemp("apart"), lengths)
    packed = PackedLayout(store, length=length, seed=seed, isolate_documents=True)
    joined = PackedLayout(store, length=length, seed=seed)
    ends = np.cumsum(lengths)
    rows = packed.build_samples(np.arange(2 * packed.samples_per_epoch))
    assert rows.documents is not None
    plain = joined.build_samples(np.arange(2 * packed.samples_per_epoch))
    assert (rows.inputs == plain.inputs).all()
    for inputs, labels, numbers in zip(
        rows.inputs.tolist(), rows.labels.tolist(), rows.documents.tolist(), strict=True
    ):
        owners = [int(np.searchsorted(ends, token, side="left")) for token in inputs]
        for place, (one, other) in enumerate(pairwise(owners)):
            follows = one == other and inputs[place + 1] == inputs[place] + 1
            assert (numbers[place] == numbers[place + 1]) == follows
        assert numbers[0] == 1
        for token, label in zip(inputs, labels, strict=True):
            assert label == IGNORED or (label == token + 1 and token not in ends)
    crossing = rows.labels == IGNORED
    assert (rows.labels[~crossing] == plain.labels[~crossing]).all()


@settings(max_examples=30, deadline=None)
@given(lengths=LENGTHS, length=st.integers(1, 15), batch=st.integers(1, 5), isolated=st.booleans())
def test_unshuffled_every_token_is_predicted_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, batch: int, isolated: bool
) -> None:
    store = store_of(tmp_path_factory.mktemp("order"), lengths)
    labels = np.concatenate(
        [
            one.labels.ravel()
            for one in batches_in_order(
                [PackedLayout(store, length=length, seed=None, isolate_documents=isolated)], batch
            )
        ]
    )
    firsts = {1, *(np.cumsum(lengths) + 1).tolist()} if isolated else {1}
    assert labels[labels != IGNORED].tolist() == [token for token in range(2, sum(lengths) + 1) if token not in firsts]


@settings(max_examples=40, deadline=None)
@given(
    lengths=LENGTHS,
    length=st.integers(1, 15),
    seed=st.integers(0, 99),
    long=st.sampled_from(["truncate", "split", "end"]),
)
def test_padded_samples_have_one_document_each(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, seed: int, long: str
) -> None:
    if max(lengths) < 2:
        lengths = [*lengths, 2]
    store = store_of(tmp_path_factory.mktemp("padded"), lengths)
    padded = PaddedLayout(store, length=length, seed=seed, pad_id=0, long_documents=long, eos_id=999)
    expected = []
    for end, size in zip(np.cumsum(lengths).tolist(), lengths, strict=True):
        document = list(range(end - size + 1, end + 1))
        starts = range(0, size - 1, length) if long == "split" else range(min(1, size - 1))
        for start in starts:
            row = document[start : start + length + 1]
            if long == "end" and size - start > length + 1:
                row[-1] = 999
            inputs, labels = row[:-1] if len(row) == length + 1 else row, row[1:]
            expected.append((inputs + [0] * (length - len(inputs)), labels + [IGNORED] * (length - len(labels))))
    rows = padded.build_samples(np.arange(padded.samples_per_epoch, 2 * padded.samples_per_epoch))
    found = list(zip(rows.inputs.tolist(), rows.labels.tolist(), strict=True))
    assert sorted(found) == sorted(expected)
    layout = PaddedLayout(store, length=length, seed=None, pad_id=0, long_documents=long, eos_id=999)
    natural = layout.build_samples(np.arange(padded.samples_per_epoch))
    assert list(zip(natural.inputs.tolist(), natural.labels.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("weights", "draws"),
    [
        ([3, 7], [1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1]),
        ([5, 3, 2], [0, 1, 2, 0, 1, 0, 2, 0, 1, 0] * 2),
    ],
)
def test_blends_equal_those_of_megatron(weights: list[float], draws: list[int]) -> None:
    assert Blend(weights).locate(np.arange(20))[0].tolist() == draws
    assert Blend([weight / 10 for weight in weights]).locate(np.arange(20))[0].tolist() == draws


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_blends_follow_the_rule_to_any_length(weights: list[int]) -> None:
    """The rule in integers: the largest w_k * max(i, 1) - used_k * sum(w), the first on a tie."""
    used, total = [0] * len(weights), sum(weights)
    expected = []
    for sample in range(4 * total):
        behind = [weight * max(sample, 1) - total * count for weight, count in zip(weights, used, strict=True)]
        chosen = behind.index(max(behind))
        expected.append((chosen, used[chosen]))
        used[chosen] += 1
    stores, numbers = Blend([float(weight) for weight in weights]).locate(np.arange(4 * total))
    assert list(zip(stores.tolist(), numbers.tolist(), strict=True)) == expected


@settings(max_examples=8, deadline=None)
@given(st.lists(st.floats(0.001, 1000), min_size=2, max_size=6), st.integers(0, 10**12))
def test_any_weights_are_kept_at_any_sample(weights: list[float], start: int) -> None:
    blend = Blend(weights)
    stores, numbers = blend.locate(np.arange(start, start + 60))
    for place, (store, number) in enumerate(zip(stores.tolist(), numbers.tolist(), strict=True)):
        share = blend.integer_weights[store] / blend.period
        assert abs(number - share * (start + place)) <= len(weights)
        assert abs(share - weights[store] / sum(weights)) < 2e-5


def test_a_blend_takes_the_samples_of_each_store_in_order(tmp_path: Path) -> None:
    stores = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        stores.append(store_of(tmp_path / str(number), [40 + number] * 5))
    layouts = [
        PackedLayout(store, length=8, seed=number, isolate_documents=True) for number, store in enumerate(stores)
    ]
    batches = Batches(layouts, ranges_of(12, 1, 3))
    which, numbers = Blend([1, 3]).locate(np.arange(60, 72))
    batch = batches.batch_at(5)
    for row, (store, number) in enumerate(zip(which.tolist(), numbers.tolist(), strict=True)):
        alone = layouts[store].build_samples(np.array([number]))
        assert (batch.inputs[row] == alone.inputs[0]).all()
        assert (batch.labels[row] == alone.labels[0]).all()
        assert alone.documents is not None
        assert batch.documents is not None
        assert (batch.documents[row] == alone.documents[0]).all()
    mine = batches.batch_at(5, slice(3, 7))
    assert (mine.inputs == batch.inputs[3:7]).all()
    assert (mine.samples == np.arange(63, 67)).all()
    unmarked = [PackedLayout(store, length=8, seed=number) for number, store in enumerate(stores)]
    joined = Batches(unmarked, ranges_of(12, 1, 3))
    batch = joined.batch_at(5)
    for sample, store, document in joined.documents_at(5):
        ids, size = np.append(batch.inputs[sample - 60], batch.labels[sample - 60, -1]), 40 + store
        assert ((ids > document * size) & (ids <= (document + 1) * size)).any(), (
            "the reported document is in the sample"
        )


def test_cached_prefix_sums_are_written_once_and_give_the_same_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path, [7, 3, 0, 12, 5] * 30)

    def made(folder: Path | None) -> list[Any]:
        return [
            PackedLayout(store, length=6, seed=4, folder=folder),
            PaddedLayout(store, length=6, seed=4, pad_id=0, folder=folder),
        ]

    wanted = [layout.build_samples(np.arange(2 * layout.samples_per_epoch)).inputs for layout in made(None)]
    monkeypatch.setattr(sums, "MAX_IN_MEMORY", 10)
    for _ in range(2):
        for layout, rows in zip(made(tmp_path / "index"), wanted, strict=True):
            assert (layout.build_samples(np.arange(2 * layout.samples_per_epoch)).inputs == rows).all()
        monkeypatch.setattr(sums, "atomic_writer", lambda *_: pytest.fail("made again"))
    assert len(list((tmp_path / "index").glob("*.sums"))) == 3, "two epochs of one layout, one of the other"
    monkeypatch.undo()
    monkeypatch.setattr(sums, "MAX_IN_MEMORY", 10)
    packed = made(tmp_path / "index")[0]
    packed.build_samples(np.arange(4 * packed.samples_per_epoch, 5 * packed.samples_per_epoch))
    assert len(list((tmp_path / "index").glob("*.sums"))) == 2, "files of old epochs are deleted"


def test_ids_outside_the_vocabulary_are_an_error(tmp_path: Path) -> None:
    store = store_of(tmp_path, [30])
    assert PackedLayout(store, length=4, seed=1, vocab=31).build_samples(np.arange(8)).inputs.max() <= 30
    for layout in (
        PackedLayout(store, length=4, seed=1, vocab=30),
        PaddedLayout(store, length=4, seed=1, pad_id=0, vocab=30),
    ):
        with pytest.raises(TextmillError, match="token id 30, but the tokenizer's vocabulary has 30 tokens"):
            layout.build_samples(np.arange(8))
    with pytest.raises(TextmillError, match="token id -2,"):
        check_ids(np.array([1, -2, 3], np.int32), 9, "here")


@pytest.mark.parametrize(
    "train",
    [
        {"layout": "packed", "packed": {"isolate_documents": True}},
        {"layout": "padded", "padded": {"long_documents": "truncate"}},
    ],
)
def test_a_valid_split_shorter_than_a_window_is_no_error(tmp_path: Path, train: dict[str, Any]) -> None:
    tokenizer = fit(iter([["aaa bbb aaa bbb"]]), TokenizerConfig(vocab=280))
    for lengths in ([1], [5, 1], [1, 1]):
        share = WeightedStore(store_of(tmp_path, lengths), 1.0)
        splits = Splits({"train": [share], "valid": [share], "test": []}, tokenizer, "", {})
        predicted = sum(
            int((one.labels != IGNORED).sum()) for one in valid_batches(TrainConfig(**train), splits, length=64)
        )
        assert predicted == sum(max(length - 1, 0) for length in lengths), (
            "every token that follows another in its document, and no error"
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"layout": "padded", "packed": {"isolate_documents": True}},
            r"train\.packed\.isolate_documents: is for train\.layout=packed",
        ),
        ({"padded": {"long_documents": "truncate"}}, r"train\.padded\.long_documents: is for train\.layout=padded"),
    ],
)
def test_settings_of_another_layout_are_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TextmillError, match=message):
        TrainConfig(**settings)


def test_a_blend_of_many_stores_is_fast_and_follows_the_rule() -> None:
    weights = [float(number % 97 + 1) for number in range(60)]
    stores, numbers = Blend(weights).locate(np.arange(20_000))
    shares = np.array(weights) / sum(weights)
    assert np.abs(np.bincount(stores, minlength=60) - shares * 20_000).max() < 3
    assert all((numbers[stores == store] == np.arange((stores == store).sum())).all() for store in range(60))


@pytest.mark.parametrize("windows", [True, False])
def test_a_store_that_is_truncated_between_two_batches_is_an_error(tmp_path: Path, windows: bool) -> None:
    store = store_of(tmp_path, [40, 40, 40])
    if windows:
        batches = window_batches(store, length=8, stride=8, batch=2, first_input=0)
    else:
        batches = batches_in_order([PackedLayout(store, length=8, seed=None)], 2)
    next(batches)
    os.truncate(store_paths(store.prefix)[1], 20)
    with pytest.raises(TextmillError, match=r"was truncated from \d+ to 20 bytes while it was read; put the file back"):
        next(batches)
