"""The masked layout: pairs, truncation and masking against plain Python, statistics over a million tokens, ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import bert_reference
from textmill.config import MaskedConfig
from textmill.counters import draw
from textmill.errors import TextmillError
from textmill.tokens.batches.batch import IGNORED, Batch
from textmill.tokens.batches.blend import DataRange
from textmill.tokens.batches.loader import Batches
from textmill.tokens.batches.masked import MaskedLayout, pack_rows
from textmill.tokens.batches.masking import MaskedTokens, MaskingRule, choose_tokens
from textmill.tokens.batches.sentence_pairs import SentencePairs, Sentences, truncate
from textmill.tokens.store import StoreWriter, TokenStore, open_store

PAD, UNKNOWN, CLS, SEP, MASK, ORDINARY = 0, 1, 2, 3, 4, 5
"""Special tokens, and the first ordinary one."""


def store_of(folder: Path, documents: Sequence[Sequence[int]], ids: Any = None) -> TokenStore:
    """A store of documents, each a list of sentence lengths; by default its ids count up from ORDINARY."""
    lengths = np.array([size for sizes in documents for size in sizes], np.int64)
    ids = np.arange(lengths.sum()) + ORDINARY if ids is None else ids
    with StoreWriter(folder / "s", np.dtype(np.int32)) as writer:
        writer.add_flat(ids, lengths, np.array([len(sizes) for sizes in documents]))
    return open_store(folder / "s")


def tokens_of(vocab: int, *, starts: Any = None, **options: Any) -> MaskedTokens:
    special = np.arange(vocab) < ORDINARY
    return MaskedTokens(CLS, SEP, PAD, None, SEP, MaskingRule(MASK, special, starts, **options))


def layout_of(
    store: TokenStore, *, length: int = 64, seed: int | None = 5, packs: bool = True, **options: Any
) -> MaskedLayout:
    config = MaskedConfig(**options)
    rule = {"probability": config.probability, "max_predictions": config.max_predictions}
    tokens = tokens_of(int(store.ids.max()) + 1, **rule)
    return MaskedLayout(store, length=length, seed=seed, tokens=tokens, settings=config, packs=packs)


def originals(rows: Any) -> Any:
    """The inputs before masking."""
    return np.where(rows.labels == IGNORED, rows.inputs, rows.labels)


DOCUMENTS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=12)


def test_spans_are_those_of_megatron(tmp_path: Path) -> None:
    """The example of Megatron's sample mapping, in which no short sample is drawn."""
    sentences = Sentences(store_of(tmp_path, [[10, 20, 5], [7], [8, 30, 9, 4]]))
    pairs = SentencePairs(sentences, label="order", longest=29, short_probability=0.0, seed=1)
    found = np.concatenate([pairs.find_spans(edges) for edges in sentences.blocks()])
    assert found[:, :2].tolist() == [[0, 3], [4, 6], [6, 8]]
    assert found[:, 2].tolist() == [29, 29, 13], "at most 29 tokens, or what the sentences have"


@settings(max_examples=30, deadline=None)
@given(documents=DOCUMENTS, longest=st.integers(5, 90), probability=st.sampled_from([0.0, 0.1, 0.7]))
def test_spans_equal_the_plain_rule(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], longest: int, probability: float
) -> None:
    store = store_of(tmp_path_factory.mktemp("spans"), documents)
    pairs = SentencePairs(Sentences(store), label="next", longest=longest, short_probability=probability, seed=3)
    sizes = [size for document in documents for size in document]
    edges = np.cumsum([0, *map(len, documents)]).tolist()
    expected = bert_reference.find_spans(edges, sizes, lambda first: int(pairs._draw_targets(np.array([first]))[0]))
    found = np.concatenate([pairs.find_spans(block) for block in pairs.sentences.blocks()]).tolist()
    assert found == [[first, last, min(target, sum(sizes[first:last]))] for first, last, target in expected]


@settings(max_examples=30, deadline=None)
@given(documents=DOCUMENTS, length=st.integers(8, 70))
def test_full_sentences_equal_the_plain_rule(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], length: int
) -> None:
    layout = layout_of(store_of(tmp_path_factory.mktemp("full"), documents), length=length, pairs="none", packs=False)
    expected = [sum(pieces) for pieces in bert_reference.full_sentences(documents, length - 2)]
    assert layout.spans[:, 2].tolist() == expected
    assert layout.spans[:, 1].tolist() == np.cumsum(expected).tolist(), "all text, in order"


def test_targets_are_short_as_often_as_set(tmp_path: Path) -> None:
    layout = layout_of(store_of(tmp_path, [[3, 3]]), length=103, short_probability=0.1)
    assert isinstance(layout.source, SentencePairs)
    targets = layout.source._draw_targets(np.arange(200_000))
    short = targets[targets < 100]
    assert abs(len(short) / len(targets) - 0.1 * 98 / 99) < 0.003
    assert targets.min() == 2
    assert abs(short.mean() - (2 + 99) / 2) < 1, "uniform from 2 to 99"


def test_truncation_takes_from_the_longer_segment_at_both_ends() -> None:
    grid = np.array([(a, b, most) for a in range(1, 25) for b in range(1, 25) for most in range(2, 30)])
    starts = np.stack([np.full(len(grid), 1000), np.full(len(grid), 2000)], axis=1)
    keys = draw(np.arange(len(grid), dtype=np.uint64), 0)
    found, counts = truncate(starts, grid[:, :2], grid[:, 2], keys)
    assert counts.tolist() == [list(bert_reference.truncated_lengths(*row)) for row in grid.tolist()]
    front, removed = found - starts, grid[:, :2] - counts
    assert (front >= 0).all()
    assert (front <= removed).all()
    assert abs(front.sum() / removed.sum() - 0.5) < 0.005
    spread = ((front - removed / 2) ** 2).sum() / (removed / 4).sum()
    assert abs(spread - 1) < 0.03, "the variance of fair coins"


@pytest.mark.parametrize("pairs", ["next", "order"])
def test_pairs_are_made_of_the_right_sentences(tmp_path: Path, pairs: str) -> None:
    dice = np.random.default_rng(1)
    documents = [dice.integers(2, 12, dice.integers(2, 20)).tolist() for _ in range(300)]
    store = store_of(tmp_path, documents)
    starts = np.cumsum([0, *(size for sizes in documents for size in sizes)])
    document_of = np.repeat(np.arange(300), [sum(sizes) for sizes in documents])
    layout = layout_of(store, length=40, pairs=pairs)
    labels = []
    for epoch in range(2):
        rows = layout.build_samples(np.arange(layout.samples_per_epoch) + epoch * layout.samples_per_epoch)
        assert rows.types is not None
        assert rows.documents is not None
        assert rows.pair_labels is not None
        whole = originals(rows)
        assert ((whole == CLS) == (rows.pair_labels != IGNORED)).all()
        for row in range(len(whole)):
            for number in range(1, rows.documents[row].max() + 1):
                at = rows.documents[row] == number
                ids, types = whole[row, at].tolist(), rows.types[row, at].tolist()
                middle = ids.index(SEP)
                a, b = ids[1:middle], ids[middle + 1 : -1]
                assert ids == [CLS, *a, SEP, *b, SEP]
                assert types == [0] * (len(a) + 2) + [1] * (len(b) + 1)
                assert a == list(range(a[0], a[0] + len(a)))
                assert b == list(range(b[0], b[0] + len(b)))
                label = int(rows.pair_labels[row, at][0])
                labels.append(label)
                same = document_of[a[0] - ORDINARY] == document_of[b[0] - ORDINARY]
                if pairs == "next":
                    assert same == (label == 0)
                else:
                    assert same
                assert (a[0] < b[0]) == (label == 0) or not same
                if len(ids) < 40 and label == 0 and a[-1] + 1 == b[0]:
                    assert b[0] - ORDINARY in starts, "B starts with a sentence"
        assert (rows.documents == 0).mean() < 0.12
        assert (whole[rows.documents == 0] == PAD).all()
    assert abs(np.mean(labels) - 0.5) < 4 * 0.5 / math.sqrt(len(labels))


def test_begin_and_end_tokens_of_documents_are_left_out(tmp_path: Path) -> None:
    ids = np.array([CLS, 10, 11, 12, 13, SEP, CLS, 20, 21, 22, 23, SEP])
    store = store_of(tmp_path, [[3, 3], [3, 3]], ids)
    for pairs in ("next", "order", "none"):
        config = MaskedConfig(pairs=pairs)  # type: ignore[arg-type]
        tokens = MaskedTokens(CLS, SEP, PAD, CLS, SEP, MaskingRule(MASK, np.arange(24) < ORDINARY, None))
        rows = MaskedLayout(store, length=8, seed=1, tokens=tokens, settings=config).build_samples(np.arange(2))
        whole = originals(rows)
        assert np.count_nonzero(whole == CLS) == 2
        assert np.count_nonzero(whole == SEP) == (2 if pairs == "none" else 4)
        assert np.count_nonzero(whole >= 10) == 8 if pairs != "next" else True


def masked_store(folder: Path, tokens: int) -> tuple[TokenStore, Any]:
    """A store of random sentences in which 30 % of the tokens continue a word, and 1 % is unknown."""
    dice = np.random.default_rng(2)
    sizes = dice.integers(4, 40, tokens // 21)
    ids = dice.zipf(1.3, sizes.sum()) % 995 + ORDINARY
    ids[dice.random(len(ids)) < 0.01] = UNKNOWN
    ids[np.cumsum(sizes) - sizes] = 10  # which starts a word
    documents = np.array_split(sizes, len(sizes) // 30)
    return store_of(folder, [one.tolist() for one in documents], ids), np.arange(1000) % 10 < 7


def test_masking_statistics_over_a_million_tokens(tmp_path: Path) -> None:
    store, starts = masked_store(tmp_path, 1_150_000)
    layout = MaskedLayout(
        store, length=128, seed=7, tokens=tokens_of(1000, starts=starts), settings=MaskedConfig(max_predictions=None)
    )
    seen = predicted = masked = kept = expected = 0
    random: list[int] = []
    pair_labels: list[int] = []
    for start in range(0, layout.samples_per_epoch, 1024):
        rows = layout.build_samples(np.arange(start, min(start + 1024, layout.samples_per_epoch)))
        whole, chosen = originals(rows), rows.labels != IGNORED
        assert not np.isin(whole[chosen], [PAD, UNKNOWN, CLS, SEP, MASK]).any(), "no special token is masked"
        assert (rows.inputs[~chosen] == whole[~chosen]).all()
        continues = (whole >= ORDINARY) & ~starts[whole]
        together = continues[:, 1:] & (whole[:, :-1] >= ORDINARY)
        assert (chosen[:, 1:] == chosen[:, :-1])[together].all(), "words are masked as a whole"
        assert rows.documents is not None
        assert rows.pair_labels is not None
        sizes = np.bincount((np.arange(len(whole))[:, None] * 100 + rows.documents)[rows.documents > 0])
        expected += sum(max(1, round(0.15 * size)) for size in sizes[sizes > 0].tolist())
        seen, predicted = seen + int((rows.documents > 0).sum()), predicted + int(chosen.sum())
        masked += int((rows.inputs[chosen] == MASK).sum())
        kept += int((rows.inputs[chosen] == whole[chosen]).sum())
        other = chosen & (rows.inputs != MASK) & (rows.inputs != whole)
        random += rows.inputs[other].tolist()
        pair_labels += rows.pair_labels[rows.pair_labels != IGNORED].tolist()
    assert seen > 1_000_000
    assert expected * 0.995 < predicted <= expected
    assert abs(masked / predicted - 0.8) < 0.005
    assert abs(kept / predicted - 0.1) < 0.005
    assert abs(len(random) / predicted - 0.1) < 0.005
    assert min(random) >= ORDINARY
    assert abs(np.mean(random) - 502) < 8, "uniform over the ordinary tokens"
    assert abs(np.mean(pair_labels) - 0.5) < 2 / math.sqrt(len(pair_labels))


@pytest.mark.parametrize("options", [{}, {"max_predictions": 5}, {"probability": 0.3}])
def test_chosen_words_equal_the_plain_rule(options: dict[str, Any]) -> None:
    dice = np.random.default_rng(4)
    starts = np.arange(1000) % 10 < 6
    lengths = dice.integers(5, 60, 150)
    ids = dice.integers(ORDINARY, 1000, lengths.sum()).astype(np.int32)
    ids[dice.random(len(ids)) < 0.05] = UNKNOWN
    firsts = np.cumsum(lengths) - lengths
    ids[firsts] = CLS
    keys = draw(np.arange(150, dtype=np.uint64), 9)
    rule = tokens_of(1000, starts=starts, **options).rule
    chosen = choose_tokens(ids, lengths, keys, rule)
    for sample, (first, length) in enumerate(zip(firsts.tolist(), lengths.tolist(), strict=True)):
        words: list[list[int]] = []
        for position in range(length):
            token = ids[first + position]
            if token >= ORDINARY:
                joins = not starts[token] and words and words[-1][-1] == position - 1
                words = [*words[:-1], [*words[-1], position]] if joins else [*words, [position]]
        key = keys[sample : sample + 1]
        order = sorted(range(len(words)), key=lambda word: draw(key, (1 << 24) + words[word][0])[0])
        predictions = min(rule.max_predictions or length, max(1, round(rule.probability * length)))
        expected = bert_reference.choose_words(words, order, predictions)
        assert set(np.flatnonzero(chosen[first : first + length]).tolist()) == expected


def test_weighted_masking_draws_in_proportion_to_the_weights() -> None:
    """Against numpy's drawing without replacement, over many draws of one sample."""
    weights = np.maximum(np.array([0, 0, 0, 0, 0, 1, 9, 100, 5000, 30, 2]), 1.0) ** -0.7
    sample = np.array([CLS, 5, 6, 7, 8, 9, 10, 8, 8, 7, SEP], np.int32)
    rule = tokens_of(11, weights=weights).rule
    assert rule.predictions(np.array([11, 20, 21])).tolist() == [2, 3, 4], "rounded up"
    tries, dice = 8_000, np.random.default_rng(6)
    keys = draw(np.arange(tries, dtype=np.uint64), 1)
    chosen = choose_tokens(np.tile(sample, tries), np.full(tries, 11), keys, rule).reshape(tries, 11)
    own = np.where(sample < ORDINARY, 0, weights[sample])
    expected = np.zeros(11)
    for _ in range(tries):
        expected[dice.choice(11, 2, replace=False, p=own / own.sum())] += 1
    assert (chosen.sum(1) == 2).all()
    assert np.abs(chosen.mean(0) - expected / tries).max() < 0.025


def same(one: Batch, two: Batch) -> bool:
    names = ("inputs", "labels", "documents", "types", "pair_labels", "samples")
    return all(np.array_equal(getattr(one, name), getattr(two, name)) for name in names)


RANGES = [DataRange(0, 32, (), [("", 1.0)])]


@pytest.mark.parametrize(("pairs", "packs"), [("next", True), ("order", True), ("none", True), ("next", False)])
def test_ranks_and_resumed_runs_see_the_same_batches(tmp_path: Path, pairs: Any, packs: bool) -> None:
    store, _ = masked_store(tmp_path, 30_000)
    config, tokens = MaskedConfig(pairs=pairs), tokens_of(1000)

    def open_again(folder: Path | None) -> Batches:
        layout = MaskedLayout(store, length=48, seed=11, tokens=tokens, settings=config, folder=folder, packs=packs)
        return Batches([layout], RANGES)

    batches = open_again(None)
    last = batches.layouts[0].samples_per_epoch // 32
    for step in (0, last, 5 * last):  # `last` contains the end of an epoch
        whole = batches.batch_at(step)
        resumed = open_again(tmp_path / "index")
        assert same(whole, resumed.batch_at(step))
        for rank in range(4):
            part = slice(rank * 8, rank * 8 + 8)
            mine = open_again(tmp_path / "index").batch_at(step, part)
            assert np.array_equal(mine.inputs, whole.inputs[part])
            assert np.array_equal(mine.labels, whole.labels[part])
            assert mine.types is not None
            assert whole.types is not None
            assert np.array_equal(mine.types, whole.types[part])
    assert len(list((tmp_path / "index").glob("*.spans"))) == 1
    assert not same(batches.batch_at(0), Batches([layout_of(store, length=48, seed=12)], RANGES).batch_at(0))


def test_epochs_mask_other_tokens(tmp_path: Path) -> None:
    store, _ = masked_store(tmp_path, 20_000)
    layout = layout_of(store, length=48, pairs="none")
    count = layout.samples_per_epoch
    first, second = (layout.build_samples(np.arange(count) + epoch * count) for epoch in range(2))
    rows = [np.lexsort(originals(one).T) for one in (first, second)]
    assert np.array_equal(originals(first)[rows[0]], originals(second)[rows[1]]), "the same text in another order"
    chosen = [(one.labels != IGNORED)[order] for one, order in zip((first, second), rows, strict=True)]
    assert 0.1 < (chosen[0] & chosen[1]).sum() / chosen[0].sum() < 0.2, "as by chance"


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=300))
def test_rows_are_packed_without_losing_items(lengths: list[int]) -> None:
    sizes = np.array(lengths)
    order, starts = pack_rows(sizes, 30)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    used = np.add.reduceat(sizes[order], starts[:-1])
    assert starts[-1] == len(lengths)
    assert used.max() <= 30
    rows: list[int] = []  # best-fit decreasing, an item at a time
    for length in sorted(lengths, reverse=True):
        space = [row for row in rows if row + length <= 30]
        if space:
            rows.remove(max(space))
        rows.append(max(space, default=0) + length)
    assert sorted(used.tolist()) == sorted(rows)


def test_documents_of_a_step_are_found(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[5, 5, 5]] * 40)
    layout = layout_of(store, length=24)
    samples = np.arange(7)
    rows, found = layout.build_samples(samples), layout.find_documents(samples)
    whole = originals(rows)
    for row in range(7):
        text = whole[row][whole[row] >= ORDINARY] - ORDINARY
        assert set((text // 15).tolist()) == set(found[1][found[0] == row].tolist())


def test_errors(tmp_path: Path) -> None:
    store = store_of(tmp_path, [[5], [7]])
    with pytest.raises(TextmillError, match=r"no document has two sentences.*corpus\.sentences=split"):
        layout_of(store)
    with pytest.raises(TextmillError, match=r"train\.length: 7 is too short"):
        layout_of(store, length=7, pairs="none")
    assert layout_of(store, pairs="none").samples_per_epoch == 1
