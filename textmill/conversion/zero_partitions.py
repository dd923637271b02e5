"""Joins the weights in a checkpoint of DeepSpeed, whose ZeRO stages cut them into one part per rank.

ZeRO's fp32 master weights are used where they exist, else the weights as they are. Optimizer states are not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from textmill.conversion.megatron_layout import flatten
from textmill.conversion.safe_unpickle import read_pickle
from textmill.errors import TextmillError

Tree = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
OPTIM_STATES = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")


def states_name(tensor: int = 0) -> str:
    """The file with the weights of a tensor-parallel rank."""
    return f"mp_rank_{tensor:02d}_model_states.pt"


def count_tensor_ranks(checkpoint: Path) -> int:
    """The tensor-parallel size: that of the highest rank that has a file."""
    names = [re.search(r"mp_rank_(\d+)_model_states\.pt$", path.name) for path in tagged_folder(checkpoint).iterdir()]
    return 1 + max((int(found[1]) for found in names if found), default=0)


def read_states(checkpoint: Path, tensor: int = 0) -> tuple[Tree, Path]:
    """The file with the weights of a tensor-parallel rank, and where it is."""
    folder, name = tagged_folder(checkpoint), states_name(tensor)
    model = folder / name if (folder / name).is_file() else folder / f"zero_pp_rank_0_{name}"
    if not model.is_file():
        raise TextmillError(f"{folder}: no {name} found; name a folder that DeepSpeed's save_checkpoint wrote")
    return _tree(read_pickle(model), "its content", model), model


def read_weights(checkpoint: Path, tensor: int = 0) -> dict[str, Tensor]:
    """All weights of a tensor-parallel rank by DeepSpeed's names; fp32 master weights where they exist."""
    folder = tagged_folder(checkpoint)
    ranks = {path: found for path in folder.iterdir() if (found := OPTIM_STATES.search(path.name))}
    own = [path for path, found in ranks.items() if int(found[2]) == tensor]
    parts = sorted(own, key=lambda path: int(ranks[path][1]))
    states, model = read_states(checkpoint, tensor)
    module = _tree({} if states.get("module") is None else states["module"], "module", model)
    weights = {
        name: value
        for name, value in flatten(module).items()
        if isinstance(name, str) and isinstance(value, Tensor) and value.numel()
    }
    if not parts:
        return weights
    optims = [
        _tree(_tree(read_pickle(path), "its content", path).get("optimizer_state_dict"), "optimizer_state_dict", path)
        for path in parts
    ]
    count = optims[0].get("partition_count", len(optims))
    counts = count if isinstance(count, list) else [count]
    if not counts or not all(type(one) is int for one in counts):
        raise _damaged(parts[0], "partition_count", count, "a number")
    if max(counts) != len(optims):
        raise TextmillError(f"{folder}: {len(optims)} of {count} optim_states files found; all are needed")
    layouts = {"fp32_flat_groups": _join_zero_3, "single_partition_of_fp32_groups": _join_zero_1_and_2}
    kind = next((kind for kind in layouts if kind in optims[0]), None)
    if kind is None:
        return weights
    flats = [_tensors(optim.get(kind), kind, path) for optim, path in zip(optims, parts, strict=True)]
    shapes = _shapes(states.get("param_shapes"), model)
    return {**weights, **dict(layouts[kind](shapes, flats, optims[0].get("param_alignment_paddings"), folder))}


def _tree(value: Any, what: str, where: Path) -> Tree:
    if not isinstance(value, dict):
        raise _damaged(where, what, value, "a dict")
    return value


def _tensors(value: Any, what: str, where: Path) -> list[Tensor]:
    if not isinstance(value, list) or not all(isinstance(one, Tensor) for one in value):
        raise _damaged(where, what, value, "a list of tensors")
    return [one.flatten() for one in value]


def _shapes(groups: Any, where: Path) -> list[Shapes]:
    """The shape of each weight by name, in the order in which a group stores them."""
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and all(map(_is_size, group.items())) for group in groups
    ):
        raise _damaged(where, "param_shapes", groups, "a list of shapes by name")
    return [{name: tuple(size) for name, size in group.items()} for group in groups]


def _is_size(item: tuple[Any, Any]) -> bool:
    name, size = item
    return (
        isinstance(name, str)
        and isinstance(size, tuple | list)
        and all(type(side) is int and side >= 0 for side in size)
    )


def _damaged(where: Path, what: str, found: Any, wanted: str) -> TextmillError:
    return TextmillError(
        f"{where}: {what} is a {type(found).__name__}, DeepSpeed saves {wanted} there; the file is damaged, or not "
        "from DeepSpeed"
    )


def _join_zero_1_and_2(
    shapes: list[Shapes], flats: list[list[Tensor]], paddings: Any, where: Path
) -> Iterator[tuple[str, Tensor]]:
    """ZeRO-1 and 2: the weights of a group in a row, cut into one equal part per rank."""
    for number, sizes in enumerate(shapes):
        joined, start = torch.cat([torch.empty(0), *[flat[number] for flat in flats if number < len(flat)]]), 0
        for place, (name, size) in enumerate(sizes.items()):
            yield name, _shaped(joined[start : min(len(joined), start + math.prod(size))], name, size, where)
            start += math.prod(size) + _padding(paddings, number, place, where)


def _padding(paddings: Any, number: int, place: int, where: Path) -> int:
    """How many padding numbers follow a weight."""
    if paddings is None or (isinstance(paddings, list) and not paddings):
        return 0
    try:
        return int(paddings[number][place])
    except (LookupError, TypeError, ValueError, OverflowError):
        raise _damaged(where, "param_alignment_paddings", paddings, "a list of lists of numbers") from None


def _join_zero_3(shapes: list[Shapes], flats: list[list[Tensor]], _: Any, where: Path) -> Iterator[tuple[str, Tensor]]:
    """ZeRO-3: each weight cut into one part per rank, the last part padded; a rank stores its parts in a row."""
    rows, start = [torch.cat([torch.empty(0), *flat]) for flat in flats], 0
    for name, size in (item for sizes in shapes for item in sizes.items()):
        size_per_rank = min(-(-math.prod(size) // len(rows)), len(rows[0]) - start)
        yield (
            name,
            _shaped(
                torch.cat([row[start : start + size_per_rank] for row in rows])[: math.prod(size)], name, size, where
            ),
        )
        start += size_per_rank


def _shaped(flat: Tensor, name: str, size: tuple[int, ...], where: Path) -> Tensor:
    if len(flat) != math.prod(size):
        raise TextmillError(
            f"{where}: '{name}' is {list(size)}, but its fp32 master weights end after {len(flat)} numbers; the "
            "files are damaged"
        )
    return flat.view(size)


def tagged_folder(checkpoint: Path) -> Path:
    """The folder of a tag: the one given, or the one that the file `latest` names."""
    if not checkpoint.is_dir():
        raise TextmillError(f"{checkpoint}: no such folder")
    if not (latest := checkpoint / "latest").is_file():
        return checkpoint
    tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if Path(tag).name != tag or not (checkpoint / tag).is_dir():
        raise TextmillError(f"{latest}: names '{tag}', which is not a folder next to it; name the tag's folder itself")
    return checkpoint / tag
