"""Megatron's checkpoints of every version and parallel size: read, with the logits that its ranks compute."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import megatron_net
from textmill.cli import main
from textmill.conversion import compare
from textmill.conversion.formats import megatron
from textmill.conversion.model import Hints
from textmill.errors import TextmillError

IDS = np.random.default_rng(2).integers(0, 300, (2, 16))
SIZES = [("0", 2, 1), ("1.0", 4, 1), ("2.0", 1, 4), ("3.0", 2, 2)]


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize(("version", "tensor", "pipeline"), SIZES)
def test_the_logits_are_those_of_the_ranks(
    tmp_path: Path, version: str, tensor: int, pipeline: int, untied: bool
) -> None:
    out = megatron_net.write(tmp_path / "out", version, tensor, pipeline, untied=untied)
    wanted = megatron_net.logits(out, tensor, pipeline, torch.from_numpy(IDS)).numpy()
    found = megatron.read(out, Hints(vocab=301))
    assert found.shape.untied is untied
    assert np.abs(compare.logits_of(found, IDS) - wanted[..., :301]).max() < 1e-5 * np.abs(wanted).max()


def test_the_imported_folder_opens_in_transformers(tmp_path: Path) -> None:
    out = megatron_net.write(tmp_path / "out", "3.0", 2, 2)
    wanted = megatron_net.logits(out, 2, 2, torch.from_numpy(IDS)).numpy()[..., :310]
    assert main(["import", str(out), str(tmp_path / "back"), "--vocab", "310"]) == 0
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "back")(torch.from_numpy(IDS)).logits.numpy()
    assert np.abs(theirs - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_a_checkpoint_without_arguments_and_with_its_padding(tmp_path: Path) -> None:
    """The oldest versions: no args, no checkpoint_version."""
    out = megatron_net.write(tmp_path / "out", "0")
    wanted = megatron_net.logits(out, 1, 1, torch.from_numpy(IDS)).numpy()
    file = out / "release" / "mp_rank_00" / "model_optim_rng.pt"
    tree = torch.load(file, weights_only=False)
    torch.save({"iteration": 3, "model": tree["model"]}, file)
    with pytest.raises(TextmillError, match="--heads N"):
        megatron.read(out, Hints())
    found = megatron.read(out, Hints(heads=4))
    assert found.shape.vocab == 320
    assert np.abs(compare.logits_of(found, IDS) - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_wrong_orders_missing_ranks_and_mixed_files_are_refused(tmp_path: Path) -> None:
    out = megatron_net.write(tmp_path / "out", "3.0", 2, 2)
    ranks = out / "release"
    shutil.move(ranks / "mp_rank_01_001", tmp_path / "aside")
    with pytest.raises(TextmillError, match=r"lacks 1 of 4 ranks, such as mp_rank_01_001"):
        megatron.read(out, Hints())
    shutil.move(tmp_path / "aside", ranks / "mp_rank_01_001")
    with pytest.raises(TextmillError, match="fewer than the vocabulary of 5,000"):
        megatron.read(out, Hints(vocab=5000))
    first = ranks / "mp_rank_00_000" / "model_optim_rng.pt"
    sound = first.read_bytes()
    changes: list[tuple[dict[str, Any], str]] = [
        ({"checkpoint_version": 1.5}, "the order of queries, keys and values is not known"),
        ({"args": {"padded_vocab_size": 999}}, "its padded vocabulary is 320 rows on 2 ranks, its arguments say 999"),
        ({"model": {}}, "has no weights under 'model'"),
        ({"model0": {}}, "virtual pipeline stages"),
    ]
    for change, message in changes:
        torch.save({**torch.load(first, weights_only=False), **change}, first)
        with pytest.raises(TextmillError, match=message):
            megatron.read(out, Hints())
        first.write_bytes(sound)
