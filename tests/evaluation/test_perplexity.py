"""The loss of a token store equals that of transformers' logits; the baselines equal slow ones made of dictionaries."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
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
from textmill.commands.evaluate import evaluate
from textmill.config import EvaluateConfig, RunConfig
from textmill.errors import TextmillError
from textmill.evaluation import scorer_torch
from textmill.evaluation.scorer_torch import TorchScorer
from textmill.evaluation.tasks import perplexity
from textmill.evaluation.tasks.perplexity import count, sum_losses
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


def store_of(ids: list[int]) -> TokenStore:
    index = Index(Path("some"), np.dtype(np.int32), np.array([len(ids)]), np.zeros(1, np.int64), 1, np.array([0, 1]))
    return TokenStore(Path("some"), np.array(ids, np.int32), index, 0, 1)


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
    checkpoint = cast(Checkpoint, SimpleNamespace(folder="none"))
    tokenizer = cast(TextTokenizer, SimpleNamespace(eos_id=0, first_id=0))
    return TorchScorer(checkpoint, net, tokenizer, batch)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.data())
def test_every_token_counts_once(tokens: int, length: int, data: st.DataObject) -> None:
    stride, batch = data.draw(st.integers(1, length)), data.draw(st.integers(1, 5))
    ids = list(range(1, tokens + 1))
    store = store_of(ids)
    batches = window_batches(store, length=length, stride=stride, batch=batch, first_input=0)
    predicted = np.concatenate([windows.labels[windows.labels != IGNORED] for windows in batches])
    assert sorted(predicted.tolist()) == ids
    found = uniform_scorer(64, batch).sum_losses(store, length=length, stride=stride)
    assert found.tokens == tokens
    assert found.loss == pytest.approx(tokens * np.log(64))


def test_ids_outside_the_models_vocabulary_raise_an_error(new_store: Callable[[list[int]], TokenStore]) -> None:
    with pytest.raises(TextmillError, match="token ids from 0 to 64 found, the model knows 64"):
        uniform_scorer(64, 1).sum_losses(new_store([1, 2, 64]), length=8, stride=8)


VOCAB, FIRST = 7, 0
streams = st.lists(st.integers(0, VOCAB - 1), max_size=60)


def slow_losses(train: list[int], valid: list[int]) -> dict[str, float]:
    """The definitions, written out."""
    seen, followers = Counter(train), defaultdict(Counter)  # type: ignore[var-annotated]
    for before, token in zip([FIRST, *train], train, strict=False):
        followers[before][token] += 1
    losses = {"unigram": 0.0, "bigram": 0.0}
    for before, token in zip([FIRST, *valid], valid, strict=False):
        unigram = (seen[token] + 1) / (len(train) + VOCAB)
        after, kinds = sum(followers[before].values()), len(followers[before])
        bigram = (followers[before][token] + kinds * unigram) / (after + kinds) if after else unigram
        losses["unigram"] -= math.log(unigram)
        losses["bigram"] -= math.log(bigram)
    return losses


@settings(max_examples=60, deadline=None)
@given(streams, streams, st.integers(1, 9))
def test_losses_equal_those_of_dictionaries(train: list[int], valid: list[int], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(perplexity, "BLOCK", block)
        counts = count(store_of(train), vocab=VOCAB, first=FIRST)
        found = sum_losses(counts, store_of(valid), first=FIRST)
    assert found == pytest.approx(slow_losses(train, valid), rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(streams)
def test_probabilities_after_any_token_sum_to_one(train: list[int]) -> None:
    counts = count(store_of(train), vocab=VOCAB, first=FIRST)
    every = np.arange(VOCAB)
    assert counts.unigram(every).sum() == pytest.approx(1, abs=1e-12)
    for before in range(VOCAB):
        probabilities = counts.bigram(np.full(VOCAB, before), every)
        assert probabilities.sum() == pytest.approx(1, abs=1e-12)
        assert (probabilities > 0).all()


def test_at_most_the_limit_is_counted() -> None:
    counts = count(store_of([1, 2, 3, 4, 5]), vocab=VOCAB, first=FIRST, limit=3)
    assert counts.counted == 3
    assert counts.tokens_V.tolist() == [0, 1, 1, 1, 0, 0, 0]


def test_a_vocabulary_of_two_million_fits_in_memory() -> None:
    vocab = 2_000_000
    counts = count(store_of([vocab - 1, vocab - 2, vocab - 1, vocab - 2, 5]), vocab=vocab, first=0)
    probabilities = counts.bigram(np.array([vocab - 1]), np.array([vocab - 2]))
    unigram = 3 / (5 + vocab)
    assert probabilities[0] == pytest.approx((2 + unigram) / 3)


def test_the_baselines_refuse_ids_outside_the_vocabulary(new_store: Callable[[list[int]], TokenStore]) -> None:
    with pytest.raises(TextmillError, match="token ids from 1 to 9 found, the vocabulary has 7"):
        count(new_store([1, 9, 2]), vocab=VOCAB, first=FIRST)


def measure_text(config: RunConfig, path: Path, text: str) -> dict[str, Any]:
    path.write_text(text, encoding="utf-8")
    found = evaluate(config.model_copy(update={"evaluate": EvaluateConfig(text=[str(path)], window=8)}))
    return dict(found["perplexity"])


def test_intervals_compare_documents_not_windows(config: RunConfig, tmp_path: Path) -> None:
    """Documents that repeat one word each: windows within a document are alike, documents are not."""
    dice = np.random.default_rng(3)
    words = ["the", "mill", "물레방아는", "river", "çark", "wheel", "서", "and", "stands", "a", "by", "있다", "its"]
    texts = [" ".join([word] * int(dice.integers(90, 110))) for word in words]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    found = measure_text(config, tmp_path / "texts.jsonl", lines)
    assert found["card"]["interval"] == "95%, from the spread of 13 documents"
    alone = [measure_text(config, tmp_path / "one.txt", text) for text in texts]
    counts = np.array([one["card"]["tokens"] for one in alone])
    losses = np.array([one["loss"] for one in alone])
    # The error of a weighted mean of 13 documents, with Student's t of 12 degrees of freedom. A document alone has
    # another context for its first tokens, hence the tolerance; windows would give a quarter of it.
    weights = counts / counts.sum()
    error = np.sqrt(13 / 12 * np.sum((weights * (losses - weights @ losses)) ** 2))
    low, high = found["intervals"]["loss"]
    assert (high - low) / 2 == pytest.approx(2.1788 * error, rel=0.2)


def test_one_document_is_compared_in_blocks(config: RunConfig, tmp_path: Path) -> None:
    """Half of a text is one word, half another: hundreds of windows are not hundreds of measurements."""
    halves = ["the " * 2000, "river " * 2000]
    first, second = (measure_text(config, tmp_path / "half.txt", half)["loss"] for half in halves)
    found = measure_text(config, tmp_path / "long.txt", "".join(halves))
    assert found["card"]["interval"] == "95%, from the spread of 20 blocks of the text"
    low, high = found["intervals"]["loss"]
    # Ten blocks of either: a standard deviation of half the difference, divided by the root of 20.
    assert (high - low) / 2 == pytest.approx(2.093 * abs(first - second) / 2 / np.sqrt(19), rel=0.1)
