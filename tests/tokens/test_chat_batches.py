"""The chat layout: full, isolated conversations with the right loss mask, before and after truncation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from textmill.config import ModelConfig, ShapeConfig
from textmill.errors import TextmillError
from textmill.models import initial_weights
from textmill.models.gpt2 import family as gpt2
from textmill.models.nets_torch import fill, new_net
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.batches.blend import DataRange
from textmill.tokens.batches.chat import ChatCounts, ChatLayout, count_conversations, kept_spans
from textmill.tokens.batches.loader import Batches, batches_in_order
from textmill.tokens.store import StoreWriter, TokenStore, open_store

X = IGNORED
STOP, PAD = 9, 0
# Ids of a conversation and its loss mask; 1 starts a turn of the user, 2 of the assistant, 9 ends every turn.
SHORT = ([1, 30, 9, 2, 40, 9], [0, 0, 0, 0, 1, 1])
LONG = ([1, 31, 32, 33, 9, 2, 41, 42, 9, 1, 34, 9, 2, 43, 44, 9], [0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1])
TINY = ([1, 9, 2, 9], [0, 0, 0, 1])


def new_store(folder: Path, conversations: list[tuple[list[int], list[int]]]) -> TokenStore:
    with StoreWriter(folder / "train", np.dtype(np.uint16), has_loss_mask=True) as writer:
        for ids, loss_mask in conversations:
            writer.add_flat(np.array(ids), np.array([len(ids)]), loss_mask=np.array(loss_mask, np.uint8))
    return open_store(folder / "train")


def test_conversations_are_packed_into_a_sample(tmp_path: Path) -> None:
    layout = ChatLayout(new_store(tmp_path, [SHORT, TINY, SHORT, LONG]), length=10, seed=None, pad_id=PAD)
    rows = layout.build_samples(np.arange(3))
    assert layout.samples_per_epoch == 3, "5 + 3 positions, then 5, then a long one"
    assert rows.inputs.tolist() == [
        [1, 30, 9, 2, 40, 1, 9, 2, 0, 0],
        [1, 30, 9, 2, 40, 0, 0, 0, 0, 0],
        [1, 34, 9, 2, 43, 44, 0, 0, 0, 0],
    ]
    assert rows.labels.tolist() == [
        [X, X, X, 40, 9, X, X, 9, X, X],
        [X, X, X, 40, 9, X, X, X, X, X],
        [X, X, X, 43, 44, 9, X, X, X, X],
    ]
    assert rows.documents is not None
    assert rows.documents.tolist() == [[1, 1, 1, 1, 1, 2, 2, 2, 0, 0], [1] * 5 + [0] * 5, [1] * 6 + [0] * 4]


@pytest.mark.parametrize(
    ("length", "inputs", "labels", "cut_question"),
    [
        (15, LONG[0][:-1], [X, X, X, X, X, 41, 42, 9, X, X, X, X, 43, 44, 9], 0),
        (6, [1, 34, 9, 2, 43, 44], [X, X, X, 43, 44, 9], 0),
        # One question with its answer is too long: the question's middle goes, then the answer's end.
        (5, [1, 34, 2, 43, 44], [X, X, 43, 44, 9], 1),
        (2, [1, 43], [43, 44], 1),
    ],
)
def test_truncation_against_hand_written_labels(
    tmp_path: Path, length: int, inputs: list[int], labels: list[int], cut_question: int
) -> None:
    store = new_store(tmp_path, [LONG, SHORT])
    layout = ChatLayout(store, length=length, seed=None, pad_id=PAD, pack=False)
    rows = layout.build_samples(np.arange(1))
    padding = length - len(inputs)
    assert rows.inputs.tolist() == [inputs + [PAD] * padding]
    assert rows.labels.tolist() == [labels + [X] * padding]
    (tmp_path / "one").mkdir()
    one = ChatLayout(new_store(tmp_path / "one", [LONG]), length=length, seed=None, pad_id=PAD)
    kept = sum(label != X for label in labels)
    assert count_conversations(one, STOP) == ChatCounts(
        conversations=1,
        tokens=16,
        loss_tokens=kept,
        truncated=int(length < 15),
        cut_questions=cut_question,
        with_stop=int(STOP in labels),
        longest=16,
    )


@given(turns=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6), most=st.integers(3, 30))
def test_every_kept_answer_has_its_question(turns: list[tuple[int, int]], most: int) -> None:
    """An answer is kept from its first token on, right behind the end of its own question, and no more than fit."""
    loss = np.concatenate([[0] * question + [1] * answer for question, answer in turns]).astype(np.uint8)
    if len(loss) <= most:
        return
    spans = kept_spans(loss, most)
    places = [place for start, stop in spans for place in range(start, stop)]
    assert places == sorted(set(places))
    assert 0 <= places[0] < places[-1] < len(loss)
    assert len(places) <= most
    if not loss.any():
        return
    assert loss[places].any()
    for number, place in enumerate(places):
        if loss[place]:
            assert number > 0
            assert places[number - 1] == place - 1 or (not loss[place - 1] and not loss[places[number - 1]])


def random_store(folder: Path, count: int = 300) -> TokenStore:
    dice = np.random.default_rng(3)
    made = []
    for number in range(count):
        answer = dice.integers(10, 500, dice.integers(0, 30)).tolist()
        made.append(([1, 10 + number, 9, 2, *answer, 9], [0, 0, 0, 0, *[1] * len(answer), 1]))
    return new_store(folder, made)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("seed", [None, 7])
def test_each_epoch_has_every_conversation_once(tmp_path: Path, pack: bool, seed: int | None) -> None:
    store = random_store(tmp_path)
    layout = ChatLayout(store, length=40, seed=seed, pad_id=PAD, pack=pack)
    assert store.loss_mask is not None
    for epoch in range(2):
        samples = np.arange(layout.samples_per_epoch) + epoch * layout.samples_per_epoch
        rows, seen = layout.build_samples(samples), layout.find_documents(samples)
        assert sorted(seen[1].tolist()) == list(range(len(store)))
        assert int((rows.labels != X).sum()) == int(store.loss_mask.sum())
        assert sorted(rows.labels[rows.labels != X].tolist()) == sorted(
            np.asarray(store.ids)[np.asarray(store.loss_mask) > 0].tolist()
        )
    if pack:
        assert layout.samples_per_epoch <= 2 * -(-(store.tokens - len(store)) // 40), (
            "next-fit needs at most twice the samples"
        )
        assert layout.samples_per_epoch < len(store)
    if seed is not None:
        first, second = (
            layout.find_documents(np.arange(layout.samples_per_epoch) + epoch * layout.samples_per_epoch)[1].tolist()
            for epoch in range(2)
        )
        assert first != second


def test_a_batch_is_a_pure_function_of_its_step(tmp_path: Path) -> None:
    store = random_store(tmp_path)
    ranges = [DataRange(0, 8, (), [("", 1.0)])]
    one, two = (Batches([ChatLayout(store, length=40, seed=7, pad_id=PAD)], ranges) for _ in range(2))
    whole, part = one.batch_at(5), two.batch_at(5, slice(2, 4))
    assert (whole.inputs[2:4] == part.inputs).all()
    assert (whole.labels[2:4] == part.labels).all()
    assert whole.documents is not None
    assert part.documents is not None
    assert (whole.documents[2:4] == part.documents).all()
    loss_mask = sum(
        int((batch.labels != X).sum())
        for batch in batches_in_order([ChatLayout(store, length=40, seed=None, pad_id=PAD)], 8)
    )
    assert store.loss_mask is not None
    assert loss_mask == int(store.loss_mask.sum())


def test_packed_conversations_are_isolated(tmp_path: Path) -> None:
    """The loss of every token is the same as if its conversation were alone."""
    store = random_store(tmp_path, 20)
    shape = gpt2.shape_of(
        ModelConfig(shape=ShapeConfig(layers=2, heads=2, width=16, positions=64)), vocab=512, eos_id=STOP
    )
    net = new_net(shape, torch.device("cpu"))
    fill(net, initial_weights(shape, 5), "the first weights")

    def losses(pack: bool) -> list[float]:
        layout = ChatLayout(store, length=64, seed=None, pad_id=PAD, pack=pack)
        rows = layout.build_samples(np.arange(layout.samples_per_epoch))
        documents = None if rows.documents is None else torch.from_numpy(rows.documents)
        with torch.no_grad():
            logits = net.logits(net(torch.from_numpy(rows.inputs), documents_NT=documents))
        labels = torch.from_numpy(rows.labels).long()
        found = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=X, reduction="none"
        )
        return [float(loss) for loss in found[labels.flatten() != X]]

    assert losses(True) == pytest.approx(losses(False), abs=2e-5)


def test_a_store_of_plain_text_is_an_error(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "train", np.dtype(np.uint16)) as writer:
        writer.add([[1, 2, 3]])
    with pytest.raises(
        TextmillError,
        match=r"has no conversations.*; make them with corpus.chat and tokenizer.chat, or set train.layout",
    ):
        ChatLayout(open_store(tmp_path / "train"), length=8, seed=None, pad_id=PAD)


def test_ids_outside_the_vocabulary_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(TextmillError, match="contains token id 40, but the tokenizer's vocabulary has 40 tokens"):
        ChatLayout(new_store(tmp_path, [SHORT]), length=8, seed=None, pad_id=PAD, vocab=40).build_samples(np.arange(1))
