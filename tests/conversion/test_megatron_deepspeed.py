"""Checkpoints of Megatron-DeepSpeed with two tensor-parallel ranks, with the logits that its ranks compute."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import megatron_net
from textmill.conversion import compare
from textmill.conversion.formats import deepspeed
from textmill.conversion.model import Hints
from textmill.errors import TextmillError

IDS = np.random.default_rng(2).integers(0, 300, (2, 16))


def saved(folder: Path) -> tuple[Path, np.ndarray]:
    """A checkpoint, and the logits of its ranks."""
    source = megatron_net.write(folder / "megatron", tensor=2, layers=2)
    wanted = megatron_net.logits(source, 2, 1, torch.from_numpy(IDS)).numpy()
    tag = folder / "saved" / "global_step3"
    tag.mkdir(parents=True)
    (tag.parent / "latest").write_text(tag.name)
    for tensor in range(2):
        tree = torch.load(source / f"release/mp_rank_{tensor:02d}/model_optim_rng.pt", weights_only=False)
        tree["module"] = tree.pop("model")
        torch.save(tree, tag / f"mp_rank_{tensor:02d}_model_states.pt")
    shutil.rmtree(source)
    return tag, wanted


def test_two_ranks_are_joined(tmp_path: Path) -> None:
    tag, wanted = saved(tmp_path)
    found = compare.logits_of(deepspeed.read(tag.parent, Hints()), IDS)
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
    (tag / "mp_rank_01_model_states.pt").rename(tag / "mp_rank_02_model_states.pt")
    with pytest.raises(TextmillError, match=r"no mp_rank_01_model_states\.pt found"):
        deepspeed.read(tag.parent, Hints())


def test_master_weights_of_zero_are_used(tmp_path: Path) -> None:
    """Each tensor-parallel rank with two data-parallel ranks, which have halves of its fp32 master weights."""
    tag, wanted = saved(tmp_path)
    for tensor in range(2):
        path = tag / f"mp_rank_{tensor:02d}_model_states.pt"
        tree = torch.load(path, weights_only=False)
        model = tree["module"]["language_model"]
        named = {f"language_model.encoder.{name}": value for name, value in model["encoder"].items()}
        for name, part in model["embedding"].items():
            named[f"language_model.embedding.{name}.weight"] = part["weight"]
        flat = torch.cat([value.flatten() for value in named.values()])
        halves = torch.cat([flat, torch.zeros(len(flat) % 2)]).chunk(2)
        for rank, half in enumerate(halves):
            part = {"partition_count": 2, "single_partition_of_fp32_groups": [half.clone()]}
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_{tensor:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": part}, path.with_name(name))
        tree["param_shapes"] = [{name: value.shape for name, value in named.items()}]
        rounded = {name: value.bfloat16() for name, value in model["encoder"].items()}
        tree["module"] = {"language_model": {"encoder": rounded, "embedding": model["embedding"]}}
        torch.save(tree, path)
    found = compare.logits_of(deepspeed.read(tag.parent, Hints()), IDS)
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
