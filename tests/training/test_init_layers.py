"""Runs that start from some blocks of a model, compared with transformers' net with the same blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.support.model_folders import TEXT, korean_tokenizer
from textmill.checkpoints.folders import list_checkpoints
from textmill.config.load import build_config, parse_settings
from textmill.corpus.prepare import prepare
from textmill.errors import TextmillError
from textmill.tokens.tokenize import tokenize
from textmill.training.loop import train
from textmill.training.start import check_start


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("given"), korean_tokenizer()
    tokenizer.save(folder)
    torch.manual_seed(3)
    numbers: dict[str, Any] = {"n_layer": 4, "n_head": 2, "n_embd": 16, "n_positions": 16}
    net = GPT2LMHeadModel(GPT2Config(**numbers, vocab_size=tokenizer.vocab))
    for parameter in net.parameters():
        parameter.data.normal_(std=0.2)
    net.save_pretrained(folder)
    return folder


def tree_of(given: Path, layers: list[int], steps: int = 1) -> dict[str, Any]:
    """A run with a learning rate so small that no weight changes."""
    folder = given.parent / "out"
    folder.mkdir(exist_ok=True)
    (folder / "text.txt").write_text("\n\n".join(TEXT * 20), encoding="utf-8")
    return {
        "folder": str(folder),
        "corpus": {"sources": [str(folder / "text.txt")], "documents": "block", "dedup": "none"},
        "tokenizer": {"use": str(given)},
        "model": {"init_from": str(given), "init_layers": layers},
        "engine": {"device": "cpu"},
        "runner": {"workers": 1},
        "train": {
            "steps": steps,
            "batch": 2,
            "warmup": 0,
            "learning_rate": 1e-30,
            "weight_decay": 0.0,
            "evaluate_batches": 1,
        },
    }


def test_blocks_are_those_of_the_given_model(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = build_config(tree_of(given, [3, 0, 0]))
    prepare(config)
    tokenize(config)
    run = train(config)
    assert "train: 3 blocks of 4: [3, 0, 0]" in capsys.readouterr().out
    wanted, found = (AutoModelForCausalLM.from_pretrained(one).eval() for one in (given, list_checkpoints(run)[1]))
    wanted.transformer.h = torch.nn.ModuleList(wanted.transformer.h[layer] for layer in (3, 0, 0))
    ids = torch.randint(0, wanted.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(found(ids).logits, wanted(ids, use_cache=False).logits)
    assert list(list_checkpoints(train(build_config(tree_of(given, [3, 0, 0], steps=2))))) == [1, 2]
    with pytest.raises(TextmillError, match=r"model\.init_layers was \[3, 0, 0\], is \[3, 1, 0\]"):
        train(build_config(tree_of(given, [3, 1, 0], steps=3)))


def test_wrong_blocks_are_refused(given: Path) -> None:
    with pytest.raises(TextmillError, match=r"names block 4, the blocks of model\.init_from are 0 to 3"):
        check_start(build_config(tree_of(given, [0, 4])))
    with pytest.raises(TextmillError, match=r"init_layers: needs model\.init_from; remove it"):
        build_config({"model": {"init_layers": [0]}})
    with pytest.raises(TextmillError, match=r"init_layers: cannot be used with model\.lora"):
        build_config({"model": {"init_layers": [0], "init_from": str(given), "lora": {"rank": 2}}})
    with pytest.raises(TextmillError, match=r"names block -1"):
        check_start(build_config(tree_of(given, [-1])))
    settings = parse_settings(["model.init_layers=0,2", f"model.init_from={given}"])
    assert build_config(settings).model.init_layers == [0, 2]
