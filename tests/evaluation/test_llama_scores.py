"""A Llama with grouped queries: scores of packed continuations, and of texts shorter than its long context."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.evaluation.conftest import MakeStore
from tests.evaluation.test_scorer import assert_equal, shared_contexts
from tests.support.weights import noisy_weights
from textmill.checkpoints.folders import open_checkpoint
from textmill.config import ModelConfig, ShapeConfig, TorchEngine
from textmill.evaluation import scorer_torch
from textmill.evaluation.scorer_torch import TorchScorer, open_scorer
from textmill.evaluation.task import Score
from textmill.models import open_family
from textmill.storage.tensor_files import encode_safetensors
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

LONG = 4096


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: TextTokenizer) -> Path:
    family, folder = open_family("llama"), tmp_path_factory.mktemp("llama")
    sizes = ShapeConfig(layers=2, heads=4, kv_heads=2, width=32, positions=LONG, qk_norm=True)
    shape = family.shape_of(ModelConfig(family="llama", shape=sizes), vocab=tokenizer.vocab, eos_id=tokenizer.eos_id)
    (folder / "config.json").write_text(json.dumps(family.hf_config_of(shape)))
    (folder / "model.safetensors").write_bytes(b"".join(encode_safetensors(noisy_weights(shape))))
    tokenizer.save(folder)
    return folder


@pytest.fixture(scope="module")
def scorer(folder: Path) -> TorchScorer:
    return open_scorer(open_checkpoint(folder), TorchEngine(device="cpu", precision="fp32"), batch=4)


def reference(model: Any, context: list[int], continuation: list[int], end: int) -> Score:
    ids = ([*context] or [end]) + continuation
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0].double()[-len(continuation) :]
    chosen = logits.log_softmax(-1)[range(len(continuation)), continuation]
    return Score(float(chosen.sum()), len(continuation), logits.argmax(-1).tolist() == continuation)


def test_packed_continuations_have_transformers_scores(
    scorer: TorchScorer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, pairs = AutoModelForCausalLM.from_pretrained(folder), shared_contexts(6, scorer.vocab)
    monkeypatch.setattr(scorer_torch, "CPU_ROW_TOKENS", 200)
    assert_equal(scorer.score_tokens(pairs), [reference(model, *pair, scorer.tokenizer.eos_id) for pair in pairs])


def test_a_short_text_does_not_fill_the_context(scorer: TorchScorer, folder: Path, new_store: MakeStore) -> None:
    model, ids, end = AutoModelForCausalLM.from_pretrained(folder), [5, 8, 13, 21, 34, 55], scorer.tokenizer.eos_id
    shapes: list[tuple[int, ...]] = []
    hook = scorer.net.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    found = scorer.sum_losses(new_store(ids), length=LONG, stride=LONG)
    hook.remove()
    wanted = -reference(model, [end], ids, end).log_likelihood
    assert (found.loss, found.tokens) == (pytest.approx(wanted, rel=1e-5), len(ids))
    assert shapes == [(1, len(ids))]


@pytest.mark.parametrize(("rows", "wanted"), [(512, True), (256, False)])
def test_the_kernel_reads_only_logits_that_it_can(rows: int, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor-parallel rank has some rows of the head only."""
    monkeypatch.setattr(scorer_torch, "can_run_kernels", lambda _: True)
    net: Any = SimpleNamespace(head=range(rows), shape=SimpleNamespace(vocab=500))
    assert scorer_torch.can_use_kernel(net) == wanted
