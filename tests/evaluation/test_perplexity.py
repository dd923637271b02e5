"""The summed loss of a token store equals one computed from transformers' logits; every token counts once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from textmill.checkpoints.folders import Checkpoint
from textmill.errors import TextmillError
from textmill.evaluation import scorer_torch
from textmill.evaluation.scorer_torch import TorchScorer
from textmill.models.nets_torch import open_net
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.batches.packed import window_batches
from textmill.tokens.store import Index, TokenStore, open_store
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

CPU = torch.device("cpu")


def scorer_of(checkpoint: Checkpoint, batch: int, dtype: torch.dtype = torch.float32) -> TorchScorer:
    return TorchScorer(checkpoint, open_net(checkpoint.folder, CPU), open_tokenizer(checkpoint.tokenizer), batch, dtype)


def reference(model: Any, ids: list[int], end: int, length: int, stride: int) -> float:
    """The loss of a stream, token by token: each is predicted in the first window that holds it."""
    stream, total, predicted = [end, *ids], 0.0, 0
    start = 0
    while predicted < len(ids):
        window = stream[start : start + length]
        with torch.no_grad():
            log_probabilities = model(torch.tensor([window])).logits[0].double().log_softmax(-1)
        for place in range(predicted - start, min(length, len(ids) - start)):
            total -= float(log_probabilities[place, ids[start + place]])
            predicted += 1
        start += stride
    return total


@pytest.mark.parametrize(("length", "stride"), [(24, 24), (24, 7), (16, 16), (16, 1), (10, 9)])
def test_the_loss_equals_that_of_transformers(checkpoint: Checkpoint, life: Path, length: int, stride: int) -> None:
    store = open_store(life / "tokens" / "valid")
    scorer = scorer_of(checkpoint, 5)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.folder)
    wanted = reference(model, store.ids.tolist(), scorer.tokenizer.eos_id, length, stride)
    found = scorer.sum_losses(store, length=length, stride=stride)
    assert found.tokens == store.tokens
    assert found.loss == pytest.approx(wanted, rel=1e-5)


def test_blocks_of_logits_give_the_same_loss(
    checkpoint: Checkpoint, life: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(life / "tokens" / "valid")
    at_once = scorer_of(checkpoint, 16).sum_losses(store, length=24, stride=24)
    one_by_one = scorer_of(checkpoint, 1)
    monkeypatch.setattr(scorer_torch, "MAX_LOGITS", 7 * one_by_one.net.shape.padded_vocab)
    assert one_by_one.sum_losses(store, length=24, stride=24).loss == pytest.approx(at_once.loss, rel=1e-6)


def test_bf16_is_close_to_fp32(checkpoint: Checkpoint, life: Path) -> None:
    # A CPU without bf16 makes torch switch mkldnn off for the entire process; other tests need it on.
    with torch.backends.mkldnn.flags(enabled=True):
        store = open_store(life / "tokens" / "valid")
        exact, near = (
            scorer_of(checkpoint, 16, dtype).sum_losses(store, length=24, stride=24).loss
            for dtype in (torch.float32, torch.bfloat16)
        )
        assert near == pytest.approx(exact, rel=2e-2)
        assert near != exact


class UniformNet(nn.Module):
    """A net that gives every token the same probability: each has the loss log(vocab)."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.shape, self.head = SimpleNamespace(vocab=vocab, padded_vocab=vocab), nn.Parameter(torch.zeros(1))

    def forward(self, ids_NT: torch.Tensor, keys_N: Any = None, cache: Any = None) -> torch.Tensor:
        return torch.zeros(*ids_NT.shape, 1)

    def logits(self, x_NTE: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*x_NTE.shape[:-1], self.shape.vocab)


def uniform_scorer(vocab: int, batch: int) -> TorchScorer:
    net: Any = UniformNet(vocab)
    no_checkpoint, tokenizer = cast(Checkpoint, None), cast(TextTokenizer, SimpleNamespace(eos_id=0))
    return TorchScorer(no_checkpoint, net, tokenizer, batch)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.data())
def test_every_token_counts_once(tokens: int, length: int, data: st.DataObject) -> None:
    stride, batch = data.draw(st.integers(1, length)), data.draw(st.integers(1, 5))
    ids = np.arange(1, tokens + 1)
    index = Index(Path("some"), np.dtype(np.int64), np.array([tokens]), np.zeros(1, np.int64), 1, np.array([0, 1]))
    store = TokenStore(Path("some"), ids, index, 0, 1)
    batches = window_batches(store, length=length, stride=stride, batch=batch, first_input=0)
    predicted = np.concatenate([windows.labels[windows.labels != IGNORED] for windows in batches])
    assert sorted(predicted.tolist()) == ids.tolist()
    found = uniform_scorer(64, batch).sum_losses(store, length=length, stride=stride)
    assert found.tokens == tokens
    assert found.loss == pytest.approx(tokens * np.log(64))


def test_ids_outside_the_vocabulary_raise_an_error(new_store: Callable[[list[int]], TokenStore]) -> None:
    with pytest.raises(TextmillError, match="token ids from 0 to 64 found, the model knows 64"):
        uniform_scorer(64, 1).sum_losses(new_store([1, 2, 64]), length=8, stride=8)
