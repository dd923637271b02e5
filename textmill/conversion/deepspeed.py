"""DeepSpeed's own checkpoints of a GPT-2, made into a folder that every verb opens: `model.init_from` names it.

python -m textmill.conversion.deepspeed CHECKPOINT CONFIG.json OUT

CHECKPOINT is what save_checkpoint wrote (its folder, or that of one tag), CONFIG.json the model's Hugging Face config. Where ZeRO left fp32
masters they are taken, else the weights as they are. Moments are not: a run goes on with DeepSpeed from there, or anew from the weights.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from textmill.conversion.pickles import read_pickle
from textmill.errors import TextmillError
from textmill.files import new_folder, read_json, shown, write_bytes, write_json
from textmill.models import open_family
from textmill.tensors import Named, blocks_of

Tree = dict[str, Any]
WHOLE = "mp_rank_00_model_states.pt"
RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt$")
PLACE = re.compile(r"^.*?(?=(transformer|lm_head)\.)")
"""What wrappers put before a weight's own name: module., model. and the like."""


def convert(checkpoint: Path, config: Path, out: Path) -> Path:
    """Write the model folder; its weights are fp32, under the names and in the layout of transformers."""
    hf = read_json(config)
    if not isinstance(hf, dict) or hf.get("model_type", "gpt2") != "gpt2":
        raise TextmillError(f"{config}: not the config.json of a GPT-2; name the one that the model was made with")
    family = open_family("gpt2")
    shape = family.shape_of_hf(hf, str(config))
    found = dict(family.known_weights(_renamed(weights_in(checkpoint))))
    wanted = {weight.name: weight.shape for weight in family.weights_of(shape)}
    if missing := [name for name in wanted if name not in found]:
        raise TextmillError(f"{checkpoint}: lacks {len(missing)} weights of a GPT-2, '{missing[0]}' among them; found {sorted(found)[:3]}")
    for name, size in wanted.items():
        if found[name].shape != size:
            raise TextmillError(f"{checkpoint}: '{name}' is {list(found[name].shape)}; {config} makes it {list(size)}")
    new_folder(out, "OUT")
    if any(out.iterdir()):
        raise TextmillError(f"{out}: not empty; name a new folder")
    write_bytes(out / "model.safetensors", blocks_of([(name, found[name]) for name in wanted]))
    write_json(out / "config.json", family.hf_config_of(shape))
    return out


def weights_in(checkpoint: Path) -> dict[str, Tensor]:
    """All weights of a checkpoint by DeepSpeed's names, fp32 where masters are there."""
    folder = _tagged(checkpoint)
    if any(folder.glob("*mp_rank_01*")):
        raise TextmillError(f"{folder}: was cut by tensor parallelism; only checkpoints of mp_rank_00 alone are read")
    parts = sorted((path for path in folder.iterdir() if RANK.search(path.name)), key=lambda path: int(RANK.search(path.name)[1]))  # type: ignore[index]
    model = folder / WHOLE if (folder / WHOLE).is_file() else folder / f"zero_pp_rank_0_{WHOLE}"
    if not model.is_file():
        raise TextmillError(f"{folder}: no {WHOLE} there; name a folder that DeepSpeed's save_checkpoint wrote")
    states = read_pickle(model)
    weights = {name: value for name, value in dict(states.get("module") or {}).items() if isinstance(value, Tensor) and value.numel()}
    if not parts:
        return weights
    optims = [read_pickle(path)["optimizer_state_dict"] for path in parts]
    count = optims[0].get("partition_count", len(optims))
    if max(count if isinstance(count, list) else [count]) != len(optims):
        raise TextmillError(f"{folder}: {len(optims)} of {count} optim_states files are there; all are needed")
    shapes = [{name: tuple(size) for name, size in group.items()} for group in states["param_shapes"]]
    if "fp32_flat_groups" in optims[0]:
        return {**weights, **dict(_pieces(shapes, [optim["fp32_flat_groups"] for optim in optims]))}
    if "single_partition_of_fp32_groups" in optims[0]:
        gaps = optims[0].get("param_alignment_paddings")
        return {**weights, **dict(_stretches(shapes, [optim["single_partition_of_fp32_groups"] for optim in optims], gaps))}
    return weights


def _stretches(shapes: list[dict[str, tuple[int, ...]]], flats: list[list[Tensor]], gaps: Any) -> Iterator[tuple[str, Tensor]]:
    """ZeRO-1 and 2: the weights of a group one after another, cut evenly into as many parts as there were processes."""
    for number, sizes in enumerate(shapes):
        whole, start = torch.cat([flat[number] for flat in flats]), 0
        for place, (name, size) in enumerate(sizes.items()):
            yield name, whole[start : start + math.prod(size)].view(size)
            start += math.prod(size) + (int(gaps[number][place]) if gaps else 0)


def _pieces(shapes: list[dict[str, tuple[int, ...]]], flats: list[list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """ZeRO-3: every weight cut into as many parts as there were processes, the last filled up; a process has its parts in a row."""
    rows, start = [torch.cat([group.flatten() for group in flat]) for flat in flats], 0
    for name, size in (item for sizes in shapes for item in sizes.items()):
        room = -(-math.prod(size) // len(rows))
        yield name, torch.cat([row[start : start + room] for row in rows])[: math.prod(size)].view(size)
        start += room


def _renamed(weights: dict[str, Tensor]) -> Iterator[Named]:
    for name, value in weights.items():
        yield PLACE.sub("", name), np.ascontiguousarray(value.detach().to(torch.float32).numpy())


def _tagged(checkpoint: Path) -> Path:
    """The folder of a tag: the one named, or the one that `latest` names."""
    if not checkpoint.is_dir():
        raise TextmillError(f"{checkpoint}: no such folder")
    if not (latest := checkpoint / "latest").is_file():
        return checkpoint
    tag = latest.read_text(encoding="utf-8").strip()
    if Path(tag).name != tag or not (checkpoint / tag).is_dir():
        raise TextmillError(f"{latest}: names '{tag}', which is no folder beside it; name the tag's folder itself")
    return checkpoint / tag


def main(words: list[str]) -> int:
    """The command line."""
    if len(words) != 3:
        print("usage: python -m textmill.conversion.deepspeed CHECKPOINT CONFIG.json OUT", file=sys.stderr)
        return 2
    try:
        out = convert(*map(Path, words))
    except TextmillError as error:
        print(f"textmill: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {shown(out)}; start from it with model.init_from={out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
