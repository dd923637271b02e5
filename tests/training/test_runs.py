"""Finetuning with resized embeddings: transformers gives the same logits for all shared tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from textmill.checkpoints.folders import Checkpoint, StepChoice, find_checkpoint, link_best, list_checkpoints
from textmill.config import TokenizerConfig
from textmill.config.load import build_config
from textmill.corpus.prepare import prepare
from textmill.errors import TextmillError
from textmill.storage.files import remove_folder
from textmill.tokens.tokenize import tokenize
from textmill.tokens.vocabulary.tokenizer import fit
from textmill.training.loop import describe_best, train

POSITIONS = 24


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model written by transformers, with its own tokenizer."""
    folder = tmp_path_factory.mktemp("given")
    tokenizer = fit(
        iter([["The mill stands by the river. Every morning the wheel begins to turn."] * 4]),
        TokenizerConfig(vocab=300),
    )
    tokenizer.save(folder)
    torch.manual_seed(2)
    shape = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=POSITIONS, vocab_size=tokenizer.vocab)
    GPT2LMHeadModel(shape).save_pretrained(folder)
    return folder


def trained(folder: Path, given: Path, texts: Path, positions: int) -> Path:
    """One step with a vocabulary of the new text and a learning rate so small that no weight changes."""
    tree: dict[str, Any] = {
        "folder": str(folder),
        "corpus": {"sources": [str(texts)], "documents": "block", "dedup": "none"},
        "tokenizer": {"vocab": 340},
        "model": {"init_from": str(given), "shape": {"positions": positions}},
        "engine": {"device": "cpu"},
        "runner": {"workers": 1},
        "train": {
            "steps": 1,
            "batch": 2,
            "warmup": 0,
            "learning_rate": 1e-30,
            "weight_decay": 0.0,
            "evaluate_batches": 1,
        },
    }
    config = build_config(tree)
    prepare(config)
    tokenize(config)
    return list_checkpoints(train(config))[1]


def test_finetuning_with_another_tokenizer_and_more_positions(
    given: Path, tiny_texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = trained(tiny_texts.parent / "out", given, tiny_texts, 2 * POSITIONS - 1)
    output = capsys.readouterr()
    assert f"the tokenizer is not that of {given}: " in output.err
    assert f"train: {2 * POSITIONS - 1} positions instead of {POSITIONS}: interpolated" in output.out
    old_net, new_net = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (given, after))
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (given, after))
    assert new_net.config.vocab_size == len(new) == 340
    assert new_net.config.eos_token_id == new.eos_token_id
    assert f"{len(old.get_vocab().keys() & new.get_vocab().keys()):,} of 340 tokens keep their vectors" in output.err
    # With every second interpolated position the new net equals the old one: same logits for all shared tokens.
    shared = sorted(old.get_vocab().keys() & new.get_vocab().keys())
    before, now = (torch.tensor(tokenizer.convert_tokens_to_ids(shared)) for tokenizer in (old, new))
    assert len(shared) > 256
    dice = torch.Generator().manual_seed(1)
    words = torch.randint(len(shared), (3, POSITIONS), generator=dice)
    with torch.no_grad():
        theirs = old_net(before[words]).logits[..., before]
        ours = new_net(now[words], position_ids=torch.arange(POSITIONS)[None] * 2).logits[..., now]
    assert (theirs - ours).abs().max() < 2e-6
    # A new token starts as the mean of the old tokens of its text.
    vectors, fresh = new_net.transformer.wte.weight.detach(), sorted(new.get_vocab().keys() - old.get_vocab().keys())
    texts = {token: new.convert_tokens_to_string([token]) for token in fresh}
    checked = {token: text for token, text in texts.items() if "\N{REPLACEMENT CHARACTER}" not in text}
    assert len(checked) > 10
    for token, text in checked.items():
        mean = old_net.transformer.wte.weight.detach()[old(text)["input_ids"]].mean(0)
        assert np.allclose(vectors[new.convert_tokens_to_ids(token)], mean, atol=1e-6)


def test_more_positions_of_a_net_without_weights_for_them(
    tiny_texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(iter([["The mill stands by the river."] * 4]), TokenizerConfig(vocab=300)).save(tmp_path)
    numbers = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    before = LlamaForCausalLM(LlamaConfig(**numbers, vocab_size=300, max_position_embeddings=POSITIONS))
    before.save_pretrained(tmp_path)
    after = trained(tiny_texts.parent / "out", tmp_path, tiny_texts, 2 * POSITIONS)
    assert "48 positions instead of 24: the net has no weights for them" in capsys.readouterr().out
    net = AutoModelForCausalLM.from_pretrained(after)
    assert net.config.max_position_embeddings == 2 * POSITIONS
    assert torch.equal(net.model.rotary_emb.inv_freq, before.model.rotary_emb.inv_freq)


def test_fewer_positions_and_a_longer_sample(given: Path, tiny_texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = trained(tiny_texts.parent / "out", given, tiny_texts, 10)
    assert f"train: 10 positions instead of {POSITIONS}: the first ones" in capsys.readouterr().out
    old_net, new_net = (AutoModelForCausalLM.from_pretrained(folder) for folder in (given, after))
    assert torch.equal(new_net.transformer.wpe.weight, old_net.transformer.wpe.weight[:10])
    tree: dict[str, Any] = {"model": {"init_from": str(given)}, "folder": str(tiny_texts.parent / "out")}
    with pytest.raises(
        TextmillError, match=r"longer than the model's 24 positions; lower it, or set model\.shape\.positions=99"
    ):
        train(build_config({**tree, "train": {"length": 99, "folder": str(tiny_texts.parent / "other")}}))
    with pytest.raises(TextmillError, match=r"model\.positions was 10, is 12"):
        train(
            build_config(
                {**tree, "model": {"init_from": str(given), "shape": {"positions": 12}}, "train": {"steps": 2}}
            )
        )
    with pytest.raises(
        TextmillError, match=r"model\.shape\.width: the weights of model\.init_from have their own shape"
    ):
        build_config({"model": {"init_from": str(given), "shape": {"width": 12}}})


def test_a_run_older_than_a_setting_resumes_with_its_default(tiny_texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree: dict[str, Any] = {
        "folder": str(tiny_texts.parent / "out"),
        "corpus": {"sources": [str(tiny_texts)], "documents": "block", "dedup": "none"},
        "tokenizer": {"vocab": 300},
        "model": {"shape": {"layers": 1, "heads": 1, "width": 8, "positions": 16}},
        "engine": {"device": "cpu"},
        "runner": {"workers": 1},
        "train": {"steps": 1, "batch": 2, "warmup": 0, "evaluate_batches": 1},
    }
    config = build_config(tree)
    prepare(config)
    tokenize(config)
    train(config)

    def older(run: Path, which: StepChoice, *, to_resume: bool) -> Checkpoint | None:
        found = find_checkpoint(run, which, to_resume=to_resume)
        assert found
        del found.progress["made_from"]["train.muon.momentum"]
        return found

    monkeypatch.setattr("textmill.training.start.find_checkpoint", older)
    with pytest.raises(
        TextmillError,
        match=r"was trained with other settings or inputs: train\.muon\.momentum was 0\.95, is 0\.5; set them back",
    ):
        train(build_config({**tree, "train": {**tree["train"], "steps": 2, "muon": {"momentum": 0.5}}}))
    assert list(list_checkpoints(train(build_config({**tree, "train": {**tree["train"], "steps": 2}})))) == [1, 2]


def test_the_best_checkpoint_and_overfitting_are_reported(tmp_path: Path) -> None:
    for step, loss in ((10, 2.5), (20, 2.25), (30, None)):
        folder = tmp_path / f"step-{step:07d}"
        folder.mkdir()
        (folder / "progress.json").write_text(
            json.dumps({"step": step, "valid_loss": None if loss is None else loss.hex()})
        )
    assert link_best(tmp_path) == 20
    assert (tmp_path / "best").resolve() == (tmp_path / "step-0000020").resolve()
    assert describe_best(tmp_path) == f"train: the best checkpoint is step 20, valid loss 2.2500: {tmp_path / 'best'}"
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 20, "valid_loss": 2.25}\n{"step": 25, "valid_loss": 2.125}\n{"step": 25}\n'
    )
    assert describe_best(tmp_path).endswith(
        "; step 25 had 2.1250 but was not saved: set train.save_every to a divisor of train.evaluate_every"
    )
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 30, "valid_loss": 2.13}\n')
    assert "overfitting" not in describe_best(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 40, "valid_loss": 2.15}\n')
    assert "; overfitting: valid loss rose from 2.1250 to 2.1500 since step 25; use more" in describe_best(tmp_path)
    remove_folder(tmp_path / "step-0000020")
    assert link_best(tmp_path) == 10
    remove_folder(tmp_path / "step-0000010")
    assert link_best(tmp_path) is None
    assert not (tmp_path / "best").is_symlink()
    assert describe_best(tmp_path) == "train: no checkpoint has a valid loss, so there is no best one"
