"""Megatron's checkpoints: every version and parallel size, computed by ranks that are not ours, and read again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import megatron_net
from tests.support.model_folders import korean_tokenizer, write_folder
from textmill.cli import main
from textmill.conversion import compare
from textmill.conversion.formats import megatron
from textmill.conversion.model import Hints
from textmill.errors import TextmillError
from textmill.storage.tensor_files import read_model

IDS = np.random.default_rng(2).integers(0, 300, (2, 16))
MORE_SIZES = [("0", 2, 1), ("1.0", 4, 1), ("2.0", 1, 4)]
SIZES = [("3.0", 2, 2), *(pytest.param(*size, marks=pytest.mark.long) for size in MORE_SIZES)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    return write_folder(folder, korean_tokenizer(), layers=4, heads=4, width=16, positions=20)


def export(source: Path, out: Path, version: str, tensor: int, pipeline: int, *more: str) -> int:
    sizes = [f"export.megatron.tensor={tensor}", f"export.megatron.pipeline={pipeline}"]
    version = f"export.megatron.version='{version}'"
    return main(["export", str(source), f"export.folder={out}", "export.kind=megatron", version, *sizes, *more])


@pytest.mark.parametrize(("version", "tensor", "pipeline"), SIZES)
def test_ranks_compute_our_logits_and_the_weights_come_back_bit_for_bit(
    source: Path, tmp_path: Path, version: str, tensor: int, pipeline: int
) -> None:
    out = tmp_path / "out"
    assert export(source, out, version, tensor, pipeline, "export.megatron.vocab_multiple=8") == 0
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(source)(torch.from_numpy(IDS)).logits
        found = megatron_net.logits(out, tensor, pipeline, torch.from_numpy(IDS))
    assert found.shape[-1] % (8 * tensor) == 0
    assert (found[..., : wanted.shape[-1]] - wanted).abs().max() < 1e-5
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "manifest.json"):
        (out / name).unlink()  # as Megatron saves it
    vocab, tokenizer = str(wanted.shape[-1]), str(source)
    assert main(["import", str(out), str(tmp_path / "back"), "--vocab", vocab, "--tokenizer", tokenizer]) == 0
    before, after = dict(read_model(source)), dict(read_model(tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(values, after[name]) for name, values in before.items())


def test_a_checkpoint_without_arguments_and_with_its_padding(source: Path, tmp_path: Path) -> None:
    """The oldest versions: no args, no checkpoint_version."""
    assert export(source, tmp_path / "out", "0", 1, 1) == 0
    (tmp_path / "out" / "config.json").unlink()
    file = tmp_path / "out" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    torch.save({"iteration": 3, "model": tree["model"]}, file)
    with pytest.raises(TextmillError, match="--heads N"):
        megatron.read(tmp_path / "out", Hints())
    found = megatron.read(tmp_path / "out", Hints(heads=4))
    assert found.shape.vocab == 384
    wanted = AutoModelForCausalLM.from_pretrained(source)(torch.from_numpy(IDS)).logits.detach().numpy()
    assert np.abs(compare.logits_of(found, IDS)[..., : wanted.shape[-1]] - wanted).max() < 1e-5


def test_wrong_orders_missing_ranks_and_mixed_files_are_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert export(source, out, "3.0", 2, 2) == 0
    ranks = out / "release"
    shutil.move(ranks / "mp_rank_01_001", tmp_path / "aside")
    with pytest.raises(TextmillError, match=r"lacks 1 of 4 ranks, such as mp_rank_01_001"):
        megatron.read(out, Hints())
    shutil.move(tmp_path / "aside", ranks / "mp_rank_01_001")
    for change, message in (
        ({"checkpoint_version": 1.5}, "the order of queries, keys and values is not known"),
        ({"args": {"padded_vocab_size": 999}}, "its padded vocabulary is 512 rows on 2 ranks, its arguments say 999"),
        ({"model": {}}, "has no weights under 'model'"),
        ({"model0": {}}, "virtual pipeline stages"),
    ):
        _changed(ranks / "mp_rank_00_000" / "model_optim_rng.pt", change)
        with pytest.raises(TextmillError, match=message):
            megatron.read(out, Hints())
        shutil.rmtree(out)
        assert export(source, out, "3.0", 2, 2) == 0
    with pytest.raises(TextmillError, match="fewer than the vocabulary of 5,000"):
        megatron.read(out, Hints(vocab=5000))
    # A writer with the wrong order: the check of what was written finds it, and nothing is left.
    monkeypatch.setitem(megatron.ORDERS, "1.0", (1, 0, 2))
    monkeypatch.setattr(megatron, "order_of", lambda *_: (1, 2, 0))
    capsys.readouterr()
    assert export(source, tmp_path / "wrong", "1.0", 1, 1) == 2
    assert "not written: its logits differ by at most" in capsys.readouterr().err
    assert not list(tmp_path.glob("wrong*"))
    assert export(source, tmp_path / "wrong", "1.0", 3, 1) == 2
    assert "export.megatron.tensor: 3 does not divide the model's 4 heads" in capsys.readouterr().err


def _changed(file: Path, change: dict[str, Any]) -> None:
    torch.save({**torch.load(file, weights_only=False), **change}, file)
