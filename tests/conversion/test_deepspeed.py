"""DeepSpeed's own checkpoints: read as DeepSpeed reads them, without running code from the files."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from textmill.cli import main
from textmill.conversion.formats.deepspeed import read_states, read_weights
from textmill.conversion.torch_files import Placeholder, read_pickle
from textmill.errors import TextmillError
from textmill.storage.tensor_files import read_model

CONFIG = {"vocab_size": 60, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 2, "model_type": "gpt2"}


def net() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(**{**CONFIG, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}))


def saved(folder: Path, zero: int, half: bool) -> Any:
    """Transformers' GPT-2, trained for two steps and saved by DeepSpeed."""
    deepspeed = pytest.importorskip("deepspeed", reason="needs the extra deepspeed")
    from tests.support.engine_runs import config_of, started

    started(config_of("deepspeed"))  # opens the group of one process
    model = net()
    settings = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": zero},
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": half},
    }
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=settings)
    ids = torch.arange(32).view(2, 16)
    for _ in range(2):
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(str(folder))
    return engine


@pytest.mark.parametrize(("zero", "half"), [(0, False), (1, True), (2, True), (3, True)])
def test_master_weights_equal_those_of_deepspeeds_own_script(zero: int, half: bool, tmp_path: Path) -> None:
    engine = saved(tmp_path / "saved", zero, half)
    if zero:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        theirs = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "saved"))
    else:
        theirs = engine.module.state_dict()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert convert(tmp_path / "saved", tmp_path / "config.json", tmp_path / "out") == 0
    ours = dict(read_model(tmp_path / "out"))
    assert len(ours) == 2 + 12 * 2 + 2
    for name, values in ours.items():
        assert np.array_equal(values, theirs[name].detach().float().numpy()), name
    from transformers import GPT2LMHeadModel

    opened = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert torch.equal(opened.transformer.wte.weight, theirs["transformer.wte.weight"].float())


def test_parts_of_several_ranks_are_joined(tmp_path: Path) -> None:
    """Both layouts as DeepSpeed documents them, built by hand from known weights: per group, and per weight."""
    state = {name: value for name, value in net().state_dict().items() if name != "lm_head.weight"}
    shapes = [{f"module.{name}": value.shape for name, value in state.items()}]
    flat = torch.cat([value.flatten() for value in state.values()])
    padded = torch.cat([flat, torch.zeros(-len(flat) % 6)])
    even = [[part.clone()] for part in padded.chunk(3)]
    rows: list[list[torch.Tensor]] = [[], [], []]
    for value in state.values():
        size = -(-value.numel() // 3)
        full = torch.cat([value.flatten(), torch.zeros(size * 3 - value.numel())])
        for row, part in zip(rows, full.split(size), strict=True):
            row.append(part.clone())
    layouts = {
        "two": ("mp_rank_00_model_states.pt", [{"single_partition_of_fp32_groups": part} for part in even]),
        "three": (
            "zero_pp_rank_0_mp_rank_00_model_states.pt",
            [{"fp32_flat_groups": [torch.cat(row)]} for row in rows],
        ),
    }
    for kind, (name, parts) in layouts.items():
        folder = tmp_path / kind
        folder.mkdir()
        torch.save({"module": {}, "param_shapes": shapes}, folder / name)
        for rank, part in enumerate(parts):
            file = folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": {"partition_count": 3, **part}}, file)
        found = read_weights(folder, read_states(folder))
        assert all(torch.equal(found[f"module.{name}"], value) for name, value in state.items()), kind
        file.unlink()
        with pytest.raises(TextmillError, match="2 of 3 optim_states files"):
            read_weights(folder, read_states(folder))


class Hostile:
    """A pickle that creates a file when its code is run."""

    def __init__(self, call: Any, *given: Any) -> None:
        self.call, self.given = call, given

    def __reduce__(self) -> Any:
        return self.call, self.given


@pytest.mark.parametrize("old", [False, True])
def test_a_hostile_file_runs_nothing(tmp_path: Path, old: bool) -> None:
    canary = tmp_path / "canary"
    calls = [
        Hostile(os.system, f"touch {canary}"),
        Hostile(exec, f"open({str(canary)!r}, 'w').close()"),
        Hostile(open, str(canary), "w"),
        Hostile(getattr, Hostile(__import__, "os"), "system"),
        Hostile(torch.save, {}, str(canary)),
    ]
    given = {"module": {"transformer.wte.weight": torch.ones(2)}, "epoch": 3, "calls": calls}
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save(given, path, _use_new_zipfile_serialization=not old)
    found = read_pickle(path)
    assert not canary.exists()
    assert found["epoch"] == 3
    assert torch.equal(found["module"]["transformer.wte.weight"], torch.ones(2))
    assert all(isinstance(call, Placeholder) for call in found["calls"])
    plain = tmp_path / "plain.pt"
    plain.write_bytes(pickle.dumps(calls))
    with pytest.raises(TextmillError, match="not a file of torch"):
        read_pickle(plain)
    assert not canary.exists()
    torch.load(path, weights_only=False)  # a reader that trusts the file runs its code
    assert canary.exists()


def convert(checkpoint: Path, config: Path, out: Path) -> int:
    return main(["import", str(checkpoint), str(out), "--kind", "deepspeed", "--config", str(config)])


def test_unreadable_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    folder = tmp_path / "empty"
    folder.mkdir()
    assert convert(folder, config, tmp_path / "out") == 2
    assert "no mp_rank_00_model_states.pt found" in capsys.readouterr().err
    assert main(["import", str(folder)]) == 2
    assert "needs WHAT OUT" in capsys.readouterr().err
    assert main(["import", str(folder), str(tmp_path / "out")]) == 2
    assert "no model that textmill knows" in capsys.readouterr().err
    torch.save({"module": {"bert.embeddings": torch.ones(2)}}, folder / "mp_rank_00_model_states.pt")
    assert convert(folder, config, tmp_path / "out") == 2
    assert "has 'transformer.bert.embeddings', which a gpt2 of this shape does not have" in capsys.readouterr().err
    torch.save({"module": {}}, folder / "mp_rank_00_model_states.pt")
    assert convert(folder, config, tmp_path / "out") == 2
    assert "lacks 28 weights, such as 'transformer.wte.weight'" in capsys.readouterr().err
    (folder / "latest").write_text("../elsewhere")
    assert convert(folder, config, tmp_path / "out") == 2
    assert "not a folder next to it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
