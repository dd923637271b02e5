"""The chat layout: whole conversations, nothing of one in another, loss where a hand marked it, before and after cutting."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from textmill.config import ModelConfig, ShapeConfig
from textmill.errors import TextmillError
from textmill.models import initial_weights
from textmill.models.gpt2 import facts as gpt2
from textmill.models.nets_torch import fill, new_net
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.batches.batch_sizes import Sizes
from textmill.tokens.batches.by_step import Batches, in_order
from textmill.tokens.batches.chat import Chat
from textmill.tokens.chat_checks import Facts, measure
from textmill.tokens.store import TokenStore, open_store
from textmill.tokens.store_writer import StoreWriter

X = IGNORED
STOP, PAD = 9, 0
# Ids of a conversation, and which of them are asked; 1 and 2 begin a turn of the user and of the assistant, 9 ends every turn.
SHORT = ([1, 30, 9, 2, 40, 9], [0, 0, 0, 0, 1, 1])
LONG = ([1, 31, 32, 33, 9, 2, 41, 42, 9, 1, 34, 9, 2, 43, 44, 9], [0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1])
TINY = ([1, 9, 2, 9], [0, 0, 0, 1])


def new_store(folder: Path, conversations: list[tuple[list[int], list[int]]]) -> TokenStore:
    with StoreWriter(folder / "train", np.dtype(np.uint16), masked=True) as writer:
        for ids, asked in conversations:
            writer.add_flat(np.array(ids), np.array([len(ids)]), asked=np.array(asked, np.uint8))
    return open_store(folder / "train")


def test_packed_side_by_side(tmp_path: Path) -> None:
    layout = Chat(new_store(tmp_path, [SHORT, TINY, SHORT, LONG]), length=10, seed=None, pad=PAD)
    rows = layout.rows(np.arange(3))
    assert layout.samples == 3, "5 + 3 places, then 5, then a long one"
    assert rows.inputs.tolist() == [
        [1, 30, 9, 2, 40, 1, 9, 2, 0, 0],
        [1, 30, 9, 2, 40, 0, 0, 0, 0, 0],
        [2, 41, 42, 9, 1, 34, 9, 2, 43, 44],
    ]
    assert rows.labels.tolist() == [
        [X, X, X, 40, 9, X, X, 9, X, X],
        [X, X, X, 40, 9, X, X, X, X, X],
        [41, 42, 9, X, X, X, X, 43, 44, 9],
    ]
    assert rows.documents is not None
    assert rows.documents.tolist() == [[1, 1, 1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0, 0, 0], [1] * 10]


@pytest.mark.parametrize(
    ("cut", "length", "inputs", "labels"),
    [
        ("start", 5, [34, 9, 2, 43, 44], [X, X, 43, 44, 9]),
        ("start", 2, [43, 44], [44, 9]),
        ("end", 7, [1, 31, 32, 33, 9, 2, 41], [X, X, X, X, X, 41, 42]),
        ("end", 5, [1, 31, 32, 33, 9], [X, X, X, X, X]),
        ("start", 15, LONG[0][:-1], [X, X, X, X, X, 41, 42, 9, X, X, X, X, 43, 44, 9]),
    ],
)
def test_cut_as_marked_by_hand(tmp_path: Path, cut: str, length: int, inputs: list[int], labels: list[int]) -> None:
    store = new_store(tmp_path, [LONG])
    rows = Chat(store, length=length, seed=None, pad=PAD, cut=cut).rows(np.arange(1))
    assert rows.inputs.tolist() == [inputs]
    assert rows.labels.tolist() == [labels]
    left = sum(label != X for label in labels)
    facts = measure(store, length, cut, STOP)
    assert facts == Facts(1, 16, 6, left, int(length < 15), int(length < 6), int(left == 0), 1, int(STOP in labels), 16)


def scattered(folder: Path, count: int = 300) -> TokenStore:
    dice = np.random.default_rng(3)
    made = []
    for number in range(count):
        words = dice.integers(10, 500, dice.integers(0, 30)).tolist()
        made.append(([1, 10 + number, 9, 2, *words, 9], [0, 0, 0, 0, *[1] * len(words), 1]))
    return new_store(folder, made)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("seed", [None, 7])
def test_each_epoch_has_every_conversation_once(tmp_path: Path, pack: bool, seed: int | None) -> None:
    store = scattered(tmp_path)
    layout = Chat(store, length=40, seed=seed, pad=PAD, pack=pack)
    assert store.asked is not None
    for epoch in range(2):
        samples = np.arange(layout.samples) + epoch * layout.samples
        rows, seen = layout.rows(samples), layout.seen(samples)
        assert sorted(seen.documents.tolist()) == list(range(len(store)))
        assert int((rows.labels != X).sum()) == int(store.asked.sum())
        assert sorted(rows.labels[rows.labels != X].tolist()) == sorted(
            np.asarray(store.ids)[np.asarray(store.asked) > 0].tolist()
        )
    if pack:
        assert layout.samples <= 2 * -(-(store.tokens - len(store)) // 40), "next-fit takes at most twice the room"
        assert layout.samples < len(store)
    if seed is not None:
        first, second = (
            layout.seen(np.arange(layout.samples) + epoch * layout.samples).documents.tolist() for epoch in range(2)
        )
        assert first != second


def test_a_batch_is_a_pure_function_of_its_step(tmp_path: Path) -> None:
    store = scattered(tmp_path)
    one, two = (Batches([Chat(store, length=40, seed=7, pad=PAD)], [1.0], Sizes(8)) for _ in range(2))
    whole, part = one.batch_at(5), two.batch_at(5, slice(2, 4))
    assert (whole.inputs[2:4] == part.inputs).all()
    assert (whole.labels[2:4] == part.labels).all()
    assert whole.documents is not None
    assert part.documents is not None
    assert (whole.documents[2:4] == part.documents).all()
    asked = sum(int((batch.labels != X).sum()) for batch in in_order([Chat(store, length=40, seed=None, pad=PAD)], 8))
    assert store.asked is not None
    assert asked == int(store.asked.sum())


def test_packed_conversations_do_not_see_one_another(tmp_path: Path) -> None:
    """The loss of every asked token is what it is when its conversation stands alone."""
    store = scattered(tmp_path, 20)
    shape = gpt2.shape_of(
        ModelConfig(shape=ShapeConfig(layers=2, heads=2, width=16, positions=64)), vocab=512, end=STOP
    )
    net = new_net(shape, torch.device("cpu"))
    fill(net, initial_weights(shape, 5), "the first weights")

    def losses(pack: bool) -> list[float]:
        layout = Chat(store, length=64, seed=None, pad=PAD, pack=pack)
        rows = layout.rows(np.arange(layout.samples))
        documents = None if rows.documents is None else torch.from_numpy(rows.documents)
        with torch.no_grad():
            logits = net.logits(net(torch.from_numpy(rows.inputs), documents_NT=documents))
        labels = torch.from_numpy(rows.labels).long()
        found = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=X, reduction="none"
        )
        return [float(loss) for loss in found[labels.flatten() != X]]

    assert losses(True) == pytest.approx(losses(False), abs=2e-5)


def test_a_store_of_plain_text_is_refused(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "train", np.dtype(np.uint16)) as writer:
        writer.add([[1, 2, 3]])
    with pytest.raises(
        TextmillError,
        match=r"holds no conversations.*; make them with corpus.chat and tokenizer.chat, or set train.layout",
    ):
        Chat(open_store(tmp_path / "train"), length=8, seed=None, pad=PAD)


def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TextmillError, match="holds the token id 40, the tokenizer has 40 pieces"):
        Chat(new_store(tmp_path, [SHORT]), length=8, seed=None, pad=PAD, vocab=40).rows(np.arange(1))
