"""LoRA adapters from end to end: trained, resumed, opened by PEFT, and refused if their base has changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.chat_runs import PAIRS, config_of, prepare_and_tokenize, write_pairs
from tests.support.weights import open_with_adapters
from textmill.checkpoints.folders import find_checkpoint, list_checkpoints, open_model
from textmill.cli import main
from textmill.config import JaxEngine, RunConfig, TorchEngine
from textmill.config.engines import DeepSpeedEngine
from textmill.errors import TextmillError
from textmill.models.base_torch import BaseNet
from textmill.models.nets_torch import open_net
from textmill.storage.tensor_files import read_tensors
from textmill.training.loop import train

IDS = torch.tensor([[5, 17, 200, 31, 8, 99], [3, 1, 4, 1, 5, 9]])
NEAR = 5e-5
"""Difference of logits in fp32 between two orders of summation: 1.4e-5 was seen without oneDNN."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of plain text, without dropout, next to its corpus."""
    folder = tmp_path_factory.mktemp("base")
    texts = [f"{question} {answer}" for question, answer in PAIRS.items()] * 4
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    config = config_of(folder, corpus=plain(folder), tokenizer={"chat": None}, train={"layout": "packed", "steps": 4})
    prepare_and_tokenize(config)
    return list_checkpoints(train(config))[4]


def plain(folder: Path) -> dict[str, Any]:
    return {"sources": [str(folder / "a.jsonl")], "chat": None, "dedup": "none"}


def adapting(folder: Path, base: Path, steps: int, **lora: Any) -> RunConfig:
    """The config of a LoRA run on the base's own text."""
    root, train_ = (
        base.parents[1],
        {
            "layout": "packed",
            "steps": steps,
            "learning_rate": 0.02,
            "schedule": "constant",
            "save_every": 3,
            "warmup": 0,
        },
    )
    config = config_of(
        root.parent,
        corpus=plain(root.parent),
        tokenizer={"chat": None},
        train={**train_, "folder": str(folder), "checkpoints": {"keep": 9}},
    )
    model = config.model.model_validate(
        {"init_from": str(base), "lora": {"rank": 4, "dropout": 0.2, **lora}, "shape": {"dropout": 0.1}}
    )
    return config.model_copy(update={"model": model})


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of LoRA without interruption."""
    return train(adapting(tmp_path_factory.mktemp("lora") / "run", base, 6))


def logits_of(folder: Path) -> torch.Tensor:
    return logits_of_net(open_net(folder, torch.device("cpu")))


def logits_of_net(net: BaseNet) -> torch.Tensor:
    with torch.no_grad():
        return net.logits(net(IDS))


def test_a_resumed_lora_run_is_bitwise_the_same(
    base: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(adapting(tmp_path / "run", base, 3))
    output = capsys.readouterr().out
    assert "136,960 parameters, 8,192 of them trained (5.98%), on cpu" in output, output
    train(adapting(tmp_path / "run", base, 6))
    assert "resumes from step 3" in capsys.readouterr().out
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "run" / "step-0000006" / name).read_bytes() == (run / "step-0000006" / name).read_bytes(), (
            name
        )
    train(adapting(run, base, 6))
    assert "done already" in capsys.readouterr().out
    with pytest.raises(
        TextmillError, match=r"trained with other settings or inputs: model\.lora\.dropout was 0\.2, is "
    ):
        train(adapting(run, base, 6, dropout=0.0))


@pytest.mark.long
def test_a_lora_run_resumes_on_another_engine(base: Path, run: Path, tmp_path: Path) -> None:
    for extra in ("deepspeed", "jax"):
        pytest.importorskip(extra, reason=f"needs the extra {extra}")
    engines = [TorchEngine(device="cpu"), JaxEngine(device="cpu"), DeepSpeedEngine(device="cpu", zero=3)]
    for number, engine in enumerate(engines):
        train(adapting(tmp_path / "run", base, 2 * number + 2).model_copy(update={"engine": engine}))
    ours, wanted = (
        dict(read_tensors(folder / "step-0000006" / "adapter_model.safetensors")) for folder in (tmp_path / "run", run)
    )
    assert ours.keys() == wanted.keys()
    for name, values in wanted.items():
        assert np.linalg.norm(ours[name] - values) <= 1e-4 * np.linalg.norm(values), name


def test_a_checkpoint_is_small_and_peft_opens_it(base: Path, run: Path) -> None:
    folder = list_checkpoints(run)[6]
    assert not (folder / "model.safetensors").exists()
    named = dict(read_tensors(folder / "adapter_model.safetensors"))
    assert {name.rpartition(".lora_")[2] for name in named} == {"A.weight", "B.weight"}
    assert {name.partition("/")[2] for name, _ in read_tensors(folder / "optimizer.safetensors")} == {
        name.removeprefix("base_model.model.") for name in named
    }
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()(IDS).logits
        opened = AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits
    assert (logits_of(base) - theirs).abs().max() > 1e-3, "six steps changed something"
    for ours in (logits_of(folder), logits_of_net(open_with_adapters(folder)), opened):
        assert (ours - theirs).abs().max() < NEAR


def test_commands_open_an_adapter_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(run), "sample.prompt=Bye", "sample.max_tokens=5", "engine.device=cpu"]) == 0
    assert main(["generate", str(list_checkpoints(run)[3]), "sample.max_tokens=5", "engine.device=cpu"]) == 0
    assert main(["check", str(run)]) == 0
    assert main(["evaluate", str(run), "evaluate.split=train", "engine.device=cpu", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert measured["step"] == 6


def test_a_bare_peft_folder_is_a_model(base: Path, run: Path, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(list_checkpoints(run)[6] / name, tmp_path)
    assert main(["generate", str(tmp_path), "sample.max_tokens=5", "engine.device=cpu"]) == 0
    assert torch.equal(logits_of(tmp_path), logits_of(list_checkpoints(run)[6]))
    # Another run can start from it: all weights, merged.
    config = adapting(tmp_path / "trained", base, 2)
    whole = config.model.model_copy(update={"init_from": str(tmp_path), "lora": None})
    started = train(
        config.model_copy(update={"model": whole, "train": config.train.model_copy(update={"learning_rate": 1e-12})})
    )
    assert (logits_of(list_checkpoints(started)[2]) - logits_of(tmp_path)).abs().max() < NEAR
    with pytest.raises(TextmillError, match=r"is an adapter itself; merge it first: textmill export"):
        train(
            config.model_copy(update={"model": config.model.model_copy(update={"init_from": str(tmp_path)})}),
            force="yes",
        )


def test_a_changed_or_missing_base_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy, folder = tmp_path / "copy", tmp_path / "run"
    shutil.copytree(base, copy)
    (copy / "progress.json").unlink()  # no longer a checkpoint of a run: no manifest protects its bits
    config = adapting(folder, base, 2).model_copy(update={"model": adapting(folder, copy, 2).model})
    train(config)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    words = ["generate", str(folder), "sample.max_tokens=2", "engine.device=cpu"]
    assert main(words) == 2
    assert "have changed since the adapter was trained; put the old ones back" in capsys.readouterr().err
    with pytest.raises(TextmillError, match=r"model\.init_from was .*, is "):
        train(config.model_copy(update={"train": config.train.model_copy(update={"steps": 4})}))
    shutil.rmtree(copy)
    assert main(words) == 2
    assert f"the base model of this adapter is missing: {copy.resolve()}: no such folder" in capsys.readouterr().err
    with pytest.raises(TextmillError, match="the base model of this adapter is missing"):
        train(config.model_copy(update={"train": config.train.model_copy(update={"steps": 4})}))


def test_new_tokens_are_saved_with_the_adapter(base: Path, tmp_path: Path) -> None:
    """The tokens of a chat template have embeddings that the base lacks; PEFT reads them into a resized embedding."""
    write_pairs(tmp_path, "pairs.jsonl", list(PAIRS.items()))
    chat = config_of(tmp_path, tokenizer={"use": str(base)}, train={"learning_rate": 0.01})
    config = chat.model_copy(
        update={"model": chat.model.model_validate({"init_from": str(base), "lora": {"targets": ["attn"]}})}
    )
    prepare_and_tokenize(config)
    train(config)
    found = find_checkpoint(train(config.model_copy(update={"train": config.train.model_copy(update={"steps": 4})})))
    assert found is not None
    assert found.step == 4
    before, after = (
        dict(open_model(str(folder)).weights())["transformer.wte.weight"] for folder in (base, found.folder)
    )
    assert len(after) == len(before) + 3
    assert np.array_equal(after[:-3], before)
    theirs = AutoModelForCausalLM.from_pretrained(base)
    theirs.resize_token_embeddings(len(AutoTokenizer.from_pretrained(found.folder)))
    with torch.no_grad():
        wanted = PeftModel.from_pretrained(theirs, found.folder).eval()(IDS).logits
    assert wanted.shape[-1] == len(after)
    assert (logits_of(found.folder) - wanted).abs().max() < NEAR


def test_lora_needs_a_base_model() -> None:
    with pytest.raises(TextmillError, match=r"model\.lora: needs weights to adapt; set model\.init_from"):
        RunConfig.model_validate({"model": {"lora": {"rank": 2}}})


def test_an_exported_adapter_is_one_model(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = list_checkpoints(run)[6], tmp_path / "out"
    assert main(["export", str(run), f"export.folder={out}"]) == 0
    assert "with its adapter merged" in capsys.readouterr().out
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits
        merged = AutoModelForCausalLM.from_pretrained(out).eval()(IDS).logits
    assert (merged - wanted).abs().max() < NEAR
    assert not (out / "adapter_config.json").exists()
