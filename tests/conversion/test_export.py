"""Exported folders, opened by transformers and compared with the model they came from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.small_models import single_process_snapshot
from tests.support.weights import noisy_weights
from textmill.checkpoints.writing import write_checkpoint
from textmill.cli import main
from textmill.config import ModelConfig, ShapeConfig, TokenizerConfig
from textmill.models import open_family
from textmill.storage.tensor_files import encode_safetensors, read_tensors
from textmill.tokens.vocabulary.tokenizer import fit

TALK = [{"role": "user", "content": "물레방아는?"}, {"role": "assistant", "content": "By the river."}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of ours with a tokenizer for chat; large weights that only fp32 can represent."""
    family = open_family("gpt2")
    tokenizer = fit(
        iter([["The mill stands by the river. 물레방아는 강가에 서 있다."] * 3]),
        TokenizerConfig(vocab=280, chat="default"),
    )
    sizes = ShapeConfig(layers=2, heads=2, width=32, positions=24)
    shape = family.shape_of(ModelConfig(size="nano", shape=sizes), vocab=tokenizer.vocab, eos_id=tokenizer.eos_id)
    texts = {
        "config.json": json.dumps(family.hf_config_of(shape)),
        "run.yaml": "{}\n",
        **tokenizer.files(shape.positions),
    }
    files = {name: text.encode() for name, text in texts.items()}
    return write_checkpoint(
        tmp_path_factory.mktemp("run"), single_process_snapshot(7, noisy_weights(shape), [], {"step": 7}, files)
    )


def export(source: Path, out: Path, *arguments: str) -> int:
    return main(["export", str(source), f"export.folder={out}", *arguments])


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_transformers_opens_it_with_the_same_logits(
    checkpoint: Path, tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    out = tmp_path / "out"
    assert export(checkpoint, out, f"export.precision={precision}") == 0
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "manifest.json",
        "README.md",
    }
    before, after = AutoModelForCausalLM.from_pretrained(checkpoint), AutoModelForCausalLM.from_pretrained(out)
    assert after.dtype == dtype
    ids = torch.randint(0, before.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(after(ids).logits, before.to(dtype)(ids).logits), "torch rounds as we do"
    old, new = AutoTokenizer.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(out)
    assert old.apply_chat_template(TALK, tokenize=False) == new.apply_chat_template(TALK, tokenize=False)
    assert old("The mill, 강가에").input_ids == new("The mill, 강가에").input_ids
    assert main(["check", str(out)]) == 0
    assert main(["generate", str(out), "sample.max_tokens=3", "engine.device=cpu"]) == 0


def test_an_existing_export_is_kept_or_replaced_with_force(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert export(checkpoint, out) == 0
    assert "parameters of " in capsys.readouterr().out
    assert export(checkpoint, out) == 0
    assert "export: done already" in capsys.readouterr().out
    assert export(checkpoint, out, "export.precision=bf16") == 2
    assert "export.precision was fp32, is bf16" in capsys.readouterr().err
    assert export(checkpoint, out, "export.precision=bf16", "--force") == 0
    # What was exported is a model as any other.
    assert export(out, tmp_path / "again", "export.precision=bf16") == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()


def test_errors_leave_nothing_behind(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(checkpoint)]) == 2
    assert "export.folder: is not set" in capsys.readouterr().err
    assert export(checkpoint, checkpoint / "inside") == 2
    assert "name a folder elsewhere" in capsys.readouterr().err
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letters.txt").write_text("dear")
    assert export(checkpoint, mine, "--force") == 2
    assert "was not made by 'textmill export'" in capsys.readouterr().err
    lacking = tmp_path / "lacking"
    lacking.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (lacking / name).write_bytes((checkpoint / name).read_bytes())
    named = list(read_tensors(checkpoint / "model.safetensors"))
    (lacking / "model.safetensors").write_bytes(b"".join(encode_safetensors(named[:-1])))
    assert export(lacking, tmp_path / "out") == 2
    assert "lacks 1 weights, such as 'transformer.ln_f.bias'" in capsys.readouterr().err
    loud = [(name, values * np.float32(1e7)) for name, values in named]
    (lacking / "model.safetensors").write_bytes(b"".join(encode_safetensors(loud)))
    assert export(lacking, tmp_path / "out", "export.precision=fp16") == 2
    assert "more than fp16 can represent; use bf16 or fp32" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_rounding_equals_torchs_for_all_kinds_of_numbers(tmp_path: Path) -> None:
    dice = np.random.default_rng(3)
    drawn = dice.integers(0, 2**32, 20000, dtype=np.uint32).view(np.float32)
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-45, 1.00390625, 1.01171875], np.float32)
    values = np.concatenate([drawn, edges])
    (tmp_path / "a").write_bytes(b"".join(encode_safetensors([("x", values)], "bf16")))
    ours = dict(read_tensors(tmp_path / "a"))["x"]
    wanted = torch.from_numpy(values).bfloat16().float().numpy()
    assert np.array_equal(ours, wanted, equal_nan=True)
