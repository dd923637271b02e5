"""DeepSpeed's own checkpoints: read as DeepSpeed reads them, without running code from the files."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.damage import WRONG, mutated
from textmill.cli import main
from textmill.conversion.formats.deepspeed import read_weights
from textmill.conversion.torch_files import Placeholder, read_pickle
from textmill.errors import TextmillError
from textmill.models import initial_weights, open_family
from textmill.storage.tensor_files import read_model

CONFIG = {"vocab_size": 60, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 2, "model_type": "gpt2"}
MORE = {
    "n_inner": 96,
    "activation_function": "gelu_new",
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "eos_token_id": 5,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}


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
        found = read_weights(folder)
        assert all(torch.equal(found[f"module.{name}"], value) for name, value in state.items()), kind
        file.unlink()
        with pytest.raises(TextmillError, match="2 of 3 optim_states files"):
            read_weights(folder)


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


def test_any_damage_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files, the model's config and the tag's name, damaged at random with a seed; there is never a traceback."""
    family = open_family("gpt2")
    state = {name: torch.from_numpy(values) for name, values in initial_weights(family.shape_of_hf(CONFIG, "here"), 3)}
    flat = torch.cat([value.flatten() for value in state.values()])
    whole = {"module": dict(state), "param_shapes": [{name: value.shape for name, value in state.items()}]}
    masters = [{"single_partition_of_fp32_groups": [flat]}, {"fp32_flat_groups": [flat]}]
    aligned = {"partition_count": 1, "param_alignment_paddings": [[0] * len(state)]}
    model, optim = (
        tmp_path / "tag" / name for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    )
    model.parent.mkdir()
    dice, messages, wrong = random.Random(7), [], (*WRONG, torch.zeros(3), torch.Size([2, 10**30]), Placeholder())
    for number in range(100):
        config, tag = dict(CONFIG), b"tag"
        held: dict[Path, Any] = {model: whole, optim: {"optimizer_state_dict": {**aligned, **masters[number // 4 % 2]}}}
        if number % 4 < 2:
            path = (model, optim)[number % 4]
            held[path] = mutated(held[path], dice, wrong)
        elif number % 4 == 2:
            config = mutated({**CONFIG, **MORE}, dice)
        else:
            tag = dice.choice([b"tag\n", b"\xff\xfe", b"ta\0g", b"", b".", b"..", b"tag/../tag", dice.randbytes(5)])
        model.touch()
        optim.touch()
        monkeypatch.setattr("textmill.conversion.formats.deepspeed.read_pickle", held.__getitem__)
        (tmp_path / "latest").write_bytes(tag)
        (tmp_path / "config.json").write_text(json.dumps(config))
        code = convert(tmp_path, tmp_path / "config.json", tmp_path.with_name("out"))
        messages.append(capsys.readouterr().err)
        shutil.rmtree(tmp_path.with_name("out"), ignore_errors=True)
        # An import that succeeds warns that there is no tokenizer.
        assert (code, messages[-1].count("\n")) in ((0, 1), (2, 1)), messages[-1]
    assert len(set(messages)) > 20
