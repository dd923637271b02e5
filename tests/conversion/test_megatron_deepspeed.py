"""Checkpoints of Megatron-DeepSpeed with two tensor-parallel ranks: computed by ranks that are not ours, read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import megatron_net
from tests.support.model_folders import korean_tokenizer, write_folder
from textmill.cli import main
from textmill.storage.tensor_files import read_model

IDS = torch.from_numpy(np.random.default_rng(2).integers(0, 300, (2, 16)))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "source", korean_tokenizer(), layers=2, heads=4, width=16, positions=20)


def exported(source: Path) -> Path:
    out = source.parent / "out"
    settings = ["export.kind=deepspeed", "export.megatron.tensor=2", "export.megatron.vocab_multiple=8"]
    assert main(["export", str(source), f"export.folder={out}", *settings]) == 0
    return out


def import_again(out: Path, back: Path) -> dict[str, Any]:
    for name in ("config.json", "manifest.json"):
        (out / name).unlink(missing_ok=True)  # as DeepSpeed saves it
    assert main(["import", str(out), str(back), "--vocab", str(korean_tokenizer().vocab)]) == 0
    return dict(read_model(back))


def test_two_ranks_compute_our_logits_and_come_back_bit_for_bit(source: Path, tmp_path: Path) -> None:
    out = exported(source)
    for tensor in range(2):
        saved = torch.load(out / "global_step0" / f"mp_rank_{tensor:02d}_model_states.pt", weights_only=False)
        assert saved["mp_world_size"] == 2
        folder = tmp_path / "megatron" / "release" / f"mp_rank_{tensor:02d}"
        folder.mkdir(parents=True)
        torch.save({**saved, "model": saved["module"]}, folder / "model_optim_rng.pt")
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("release")
    with torch.no_grad():
        wanted = AutoModelForCausalLM.from_pretrained(source)(IDS).logits
        found = megatron_net.logits(tmp_path / "megatron", 2, 1, IDS)[..., : wanted.shape[-1]]
    assert (found - wanted).abs().max() < 1e-5
    before, after = dict(read_model(source)), import_again(out, tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(np.array_equal(values, after[name]) for name, values in before.items())


@pytest.mark.long
def test_master_weights_of_zero_are_used(source: Path, tmp_path: Path) -> None:
    """Each tensor-parallel rank with two data-parallel ranks, which have halves of its fp32 master weights."""
    out = exported(source)
    for tensor in range(2):
        path = out / "global_step0" / f"mp_rank_{tensor:02d}_model_states.pt"
        saved = torch.load(path, weights_only=False)
        tree = saved["module"]["language_model"]
        named = {f"language_model.encoder.{name}": value for name, value in tree["encoder"].items()}
        for name, part in tree["embedding"].items():
            named[f"language_model.embedding.{name}.weight"] = part["weight"]
        flat = torch.cat([value.flatten() for value in named.values()])
        halves = torch.cat([flat, torch.zeros(len(flat) % 2)]).chunk(2)
        for rank, half in enumerate(halves):
            part = {"partition_count": 2, "single_partition_of_fp32_groups": [half.clone()]}
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_{tensor:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": part}, path.with_name(name))
        saved["param_shapes"] = [{name: value.shape for name, value in named.items()}]
        rounded = {name: value.bfloat16() for name, value in tree["encoder"].items()}
        saved["module"] = {"language_model": {"encoder": rounded, "embedding": tree["embedding"]}}
        torch.save(saved, path)
    before, after = dict(read_model(source)), import_again(out, tmp_path / "back")
    assert all(np.array_equal(values, after[name]) for name, values in before.items())


@pytest.mark.long
def test_wrong_files_are_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = ["export", str(source), f"export.folder={tmp_path / 'three'}", "export.kind=deepspeed"]
    assert main([*export, "export.megatron.tensor=3"]) == 2
    assert "export.megatron.tensor: 3 does not divide the model's 4 heads" in capsys.readouterr().err
    assert main([*export, "export.megatron.tensor=2", "export.megatron.pipeline=2"]) == 2
    assert "deepspeed is written for one pipeline stage" in capsys.readouterr().err
    out = exported(source)
    (out / "global_step0" / "mp_rank_01_model_states.pt").rename(out / "global_step0" / "mp_rank_02_model_states.pt")
    assert main(["import", str(out), str(tmp_path / "back")]) == 2
    assert "no mp_rank_01_model_states.pt found" in capsys.readouterr().err
    assert not (tmp_path / "three").exists()
    assert not (tmp_path / "back").exists()
