"""Damaged model files of every format: no traceback, no code of theirs runs, memory stays bounded."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgpack
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import ROOT
from tests.conversion.test_import import flax_params
from tests.support import megatron_net
from tests.support.model_folders import korean_tokenizer, write_folder
from tests.support.nanogpt_net import NanoGPT
from textmill.cli import main
from textmill.conversion.formats import KINDS, open_format


def sound_folder(root: Path, kind: str) -> Path:
    """A small sound model in a format."""
    source = write_folder(root / "source", korean_tokenizer(vocab=270), layers=1, heads=1, width=8, positions=8)
    if kind == "megatron":
        return megatron_net.write(root / "sound", layers=1)
    if kind == "nanogpt":
        args = {
            "n_layer": 1,
            "n_head": 1,
            "n_embd": 8,
            "block_size": 8,
            "bias": True,
            "vocab_size": 270,
            "dropout": 0.0,
        }
        (root / "sound").mkdir()
        torch.save({"model": NanoGPT(args).state_dict(), "model_args": args}, root / "sound" / "ckpt.pt")
        return root / "sound"
    if open_format(kind).PRECISIONS:
        assert main(["export", str(source), f"export.folder={root / 'sound'}", f"export.kind={kind}"]) == 0
        if kind == "hf":  # pickled weights next to the rest
            (root / "sound/model.safetensors").unlink()
            torch.save(AutoModelForCausalLM.from_pretrained(source).state_dict(), root / "sound/pytorch_model.bin")
    else:
        net = AutoModelForCausalLM.from_pretrained(source)
        net.config.save_pretrained(root / "sound")
        if kind == "flax":
            (root / "sound" / "flax_model.msgpack").write_bytes(msgpack.packb(flax_params(net)))
        else:
            weights = {name: value for name, value in net.state_dict().items() if name != "lm_head.weight"}
            states = {"module": weights, "param_shapes": [{name: value.shape for name, value in weights.items()}]}
            torch.save(states, root / "sound" / "mp_rank_00_model_states.pt")
            flat = torch.cat([value.flatten() for value in weights.values()])
            masters = {"partition_count": 1, "single_partition_of_fp32_groups": [flat]}
            file = root / "sound" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": masters}, file)
    return root / "sound"


def fuzz(folder: Path, kind: str, count: int) -> None:
    command = [sys.executable, "-m", "tests.support.fuzz_import", str(folder), kind, str(count), "7"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = re.search(r"refused (\d+) of (\d+)", done.stdout)
    assert found is not None
    assert 0 < int(found[1]) < count


@pytest.mark.parametrize("kind", ["gguf", "deepspeed"])
def test_a_few_damaged_files(kind: str, tmp_path: Path) -> None:
    fuzz(sound_folder(tmp_path, kind), kind, 6)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_damaged_files_of_every_format(kind: str, tmp_path: Path) -> None:
    fuzz(sound_folder(tmp_path, kind), kind, 100)
