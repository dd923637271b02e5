"""Every format, written and read again; logits from programs and nets that are not ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, pipeline

from tests.support.model_folders import TEXT, korean_tokenizer, write_folder
from tests.support.nanogpt_net import NanoGPT
from textmill.cli import main
from textmill.conversion import compare
from textmill.conversion.formats import find_kind, hf, open_format
from textmill.conversion.model import Hints

IDS = np.random.default_rng(2).integers(0, 300, (2, 16))


def export(source: Path, out: Path, *arguments: str) -> int:
    return main(["export", str(source), f"export.folder={out}", *arguments])


def their_logits(folder: Path) -> Any:
    """Transformers' logits of a folder."""
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder)(torch.from_numpy(IDS)).logits.numpy()


def our_logits(path: Path, **hints: Any) -> Any:
    return compare.logits_of(open_format(find_kind(path)).read(path, Hints(**hints)), IDS)


def test_sharded_folders_open_in_a_pipeline_with_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "MAX_FILE_BYTES", 40_000)
    source, out = write_folder(tmp_path / "source", korean_tokenizer()), tmp_path / "out"
    assert export(source, out, "export.license=apache-2.0") == 0
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 2
    assert np.array_equal(their_logits(out), their_logits(source))
    with torch.no_grad():
        answers = pipeline("text-generation", str(out))(TEXT[0], max_new_tokens=3, do_sample=False)
    assert answers[0]["generated_text"].startswith(TEXT[0])
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "| layers | 2 |" in card
    assert str(tmp_path) not in card


def test_a_difference_above_the_bound_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_folder(tmp_path / "source", korean_tokenizer())
    monkeypatch.setitem(compare.LOGIT_BOUNDS, "bf16", 1e-9)
    assert export(source, tmp_path / "out", "export.precision=bf16") == 2
    message = capsys.readouterr().err
    assert "not written: its logits differ by at most" in message
    assert "use export.precision=fp32" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_precisions_that_a_format_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "source", korean_tokenizer())
    assert export(source, tmp_path / "out", "export.precision=q8_0") == 2
    assert "export.precision: hf has fp32, bf16, fp16, found q8_0" in capsys.readouterr().err


@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_of_nanogpt_is_read(tmp_path: Path, bias: bool) -> None:
    """As its train.py saves it: compiled names, a padded vocabulary, an optimizer next to the weights."""
    torch.manual_seed(4)
    args = {"n_layer": 2, "n_head": 2, "n_embd": 24, "block_size": 20, "bias": bias, "vocab_size": 320, "dropout": 0.0}
    net = NanoGPT(args)
    state = {f"_orig_mod.{name}": value for name, value in net.state_dict().items()}
    adam = torch.optim.AdamW(net.parameters()).state_dict()
    torch.save({"model": state, "model_args": args, "optimizer": adam, "iter_num": 3}, tmp_path / "ckpt.pt")
    with torch.no_grad():
        wanted = net(torch.from_numpy(IDS)).numpy()
    assert np.abs(our_logits(tmp_path / "ckpt.pt") - wanted).max() < 1e-5
    assert np.abs(our_logits(tmp_path, vocab=301) - wanted[..., :301]).max() < 1e-5
