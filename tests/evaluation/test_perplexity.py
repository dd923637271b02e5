"""The summed loss equals one worked out from transformers' scores, and every token is asked once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from textmill.checkpoints.folders import Checkpoint
from textmill.errors import TextmillError
from textmill.evaluation import perplexity as module
from textmill.evaluation.perplexity import perplexity
from textmill.models.nets_torch import open_net
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.batches.windows import window_batches
from textmill.tokens.index_formats import Index
from textmill.tokens.store import TokenStore, open_store

CPU = torch.device("cpu")


def reference(model: Any, ids: list[int], end: int, length: int, stride: int) -> float:
    """The loss of a stream, token by token: each is scored in the first window that holds it."""
    stream, total, asked = [end, *ids], 0.0, 0
    start = 0
    while asked < len(ids):
        window = stream[start : start + length]
        with torch.no_grad():
            chances = model(torch.tensor([window])).logits[0].double().log_softmax(-1)
        for place in range(asked - start, min(length, len(ids) - start)):
            total -= float(chances[place, ids[start + place]])
            asked += 1
        start += stride
    return total


@pytest.mark.parametrize(("length", "stride"), [(24, 24), (24, 7), (16, 16), (16, 1), (10, 9)])
def test_the_loss_is_that_of_transformers(checkpoint: Checkpoint, life: Path, length: int, stride: int) -> None:
    store = open_store(life / "tokens" / "valid")
    net = open_net(checkpoint.folder, CPU)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.folder)
    wanted = reference(model, store.ids.tolist(), net.shape.end, length, stride)
    found = perplexity(net, store, length=length, stride=stride, batch=5, first=net.shape.end)
    assert found.tokens == store.tokens
    assert found.loss == pytest.approx(wanted, rel=1e-5)


def test_blocks_of_scores_change_nothing(checkpoint: Checkpoint, life: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, store = open_net(checkpoint.folder, CPU), open_store(life / "tokens" / "valid")
    whole = perplexity(net, store, length=24, stride=24, batch=16, first=net.shape.end)
    monkeypatch.setattr(module, "LOGITS_AT_A_TIME", 7 * net.shape.padded_vocab)
    parts = perplexity(net, store, length=24, stride=24, batch=1, first=net.shape.end)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_bf16_is_near(checkpoint: Checkpoint, life: Path) -> None:
    # A CPU without bf16 makes torch switch mkldnn off for the whole process; the other tests want it as it was.
    with torch.backends.mkldnn.flags(enabled=True):
        net, store = open_net(checkpoint.folder, CPU), open_store(life / "tokens" / "valid")
        exact, near = (
            perplexity(net, store, length=24, stride=24, batch=16, first=net.shape.end, precision=precision).loss
            for precision in (torch.float32, torch.bfloat16)
        )
        assert near == pytest.approx(exact, rel=2e-2)
        assert near != exact


class Witness(nn.Module):
    """A net that knows nothing and notes what it is asked: every token costs log of the vocabulary."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.shape, self.weight = SimpleNamespace(vocab=vocab, padded_vocab=vocab), nn.Parameter(torch.zeros(1))

    def forward(self, ids_NT: torch.Tensor, keys_N: Any = None, cache: Any = None) -> torch.Tensor:
        return torch.zeros(*ids_NT.shape, 1)

    def logits(self, x_NTE: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*x_NTE.shape[:-1], self.shape.vocab)


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.data())
def test_every_token_counts_once(tokens: int, length: int, data: st.DataObject) -> None:
    stride, batch = data.draw(st.integers(1, length)), data.draw(st.integers(1, 5))
    ids = np.arange(1, tokens + 1)
    index = Index(Path("some"), np.dtype(np.int64), np.array([tokens]), np.zeros(1, np.int64), 1, np.array([0, 1]))
    store = TokenStore(Path("some"), ids, index, 0, 1)
    batches = window_batches(store, length=length, stride=stride, batch=batch, first=0)
    asked = np.concatenate([windows.labels[windows.labels != IGNORED] for windows in batches])
    assert sorted(asked.tolist()) == ids.tolist()
    found = perplexity(Witness(64), store, length=length, stride=stride, batch=batch, first=0)
    assert found.tokens == tokens
    assert found.loss == pytest.approx(tokens * np.log(64))


def test_ids_that_the_model_does_not_know_are_refused(new_store: Callable[[list[int]], TokenStore]) -> None:
    with pytest.raises(TextmillError, match="token ids from 0 to 64, the model knows 64"):
        perplexity(Witness(64), new_store([1, 2, 64]), length=8, stride=8, batch=1, first=0)
