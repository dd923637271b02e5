"""DeepSpeed's checkpoints with ZeRO 0 to 3, also of Megatron-DeepSpeed; read only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from textmill.conversion.formats import megatron
from textmill.conversion.formats.hf import read_hf_shape
from textmill.conversion.formats.megatron import ParallelSizes, flatten
from textmill.conversion.model import Hints, Model, collect_weights
from textmill.conversion.torch_files import read_pickle, to_array
from textmill.errors import TextmillError
from textmill.storage.remote_folders import first_line

PRECISIONS: tuple[str, ...] = ()
LATEST = "latest"
PREFIX = re.compile(r"^.*?(?=(transformer|lm_head)\.)")
"""What wrappers put before the name of a weight, such as module. or model."""


def matches(path: Path) -> bool:
    """A folder with a tag named in `latest`, or that of a tag."""
    return path.is_dir() and ((path / LATEST).is_file() or any(path.glob("*mp_rank_*_model_states.pt")))


def read(path: Path, hints: Hints) -> Model:
    """Read a checkpoint; its sizes are in a config.json, which DeepSpeed does not write."""
    tag = tagged_folder(path)
    if (count := count_tensor_ranks(tag)) > 1:
        return _read_tensor_parallel(path, tag, count, hints)
    config = hints.config or next((one for one in (path, tag, tag.parent) if (one / "config.json").is_file()), None)
    if config is None:
        raise TextmillError(
            f"{path}: DeepSpeed does not record the sizes of a model; name its config.json: --config FILE"
        )
    shape = read_hf_shape(config, "gpt2")
    named = ((PREFIX.sub("", name), to_array(value)) for name, value in read_weights(tag, read_states(tag)).items())
    return Model(shape, collect_weights(shape, named, str(path)), hints.open_tokenizer(path))


def _read_tensor_parallel(path: Path, tag: Path, count: int, hints: Hints) -> Model:
    """Read what Megatron-DeepSpeed saved: Megatron's modules on each rank, without pipeline parallelism."""
    ranks = {}
    for tensor in reversed(range(count)):  # the first rank's arguments are read below
        states = read_states(tag, tensor)
        ranks[tensor, 0] = megatron.state_of({"model": read_weights(tag, states, tensor)}, path)
    args = megatron.plain_args(states.get("args"))
    return megatron.join_ranks(
        path, path, ranks, ParallelSizes(count, 1), args, states.get("checkpoint_version"), hints
    )


Tree = dict[str, Any]
OPTIM_STATES = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
"""The file of a data-parallel rank and a tensor-parallel rank."""


def count_tensor_ranks(folder: Path) -> int:
    """The tensor-parallel size: that of the highest rank that has a file."""
    ranks = [0]
    for path in folder.iterdir():
        if match := re.search(r"mp_rank_(\d+)_model_states\.pt$", path.name):
            ranks.append(int(match[1]))
    return 1 + max(ranks)


def read_states(folder: Path, tensor: int = 0) -> Tree:
    """The file with the weights of a tensor-parallel rank."""
    name = f"mp_rank_{tensor:02d}_model_states.pt"
    path = folder / name if (folder / name).is_file() else folder / f"zero_pp_rank_0_{name}"
    if not path.is_file():
        raise TextmillError(f"{folder}: no {name} found; name a folder that DeepSpeed's save_checkpoint wrote")
    states = read_pickle(path)
    if not isinstance(states, dict):
        raise TextmillError(f"{path}: holds a {type(states).__name__}; DeepSpeed saves a dict")
    return states


def read_weights(folder: Path, states: Tree, tensor: int = 0) -> dict[str, Tensor]:
    """All weights of a tensor-parallel rank by DeepSpeed's names; fp32 master weights where they exist."""
    try:
        weights = flatten(states.get("module") or {}) | dict(_read_masters(folder, states, tensor))
    except TextmillError:
        raise
    except Exception as error:  # a file of other content fails anywhere
        raise TextmillError(
            f"{folder}: has other content than DeepSpeed saves ({type(error).__name__}: {first_line(error)}); the "
            "files are damaged, or not from DeepSpeed"
        ) from None
    return {
        name: value
        for name, value in weights.items()
        if isinstance(name, str) and isinstance(value, Tensor) and value.numel()
    }


def _read_masters(folder: Path, states: Tree, tensor: int) -> Iterator[tuple[str, Tensor]]:
    """The fp32 master weights that ZeRO divided among the data-parallel ranks; none without ZeRO."""
    by_rank: dict[int, Path] = {}
    for path in folder.iterdir():
        match = OPTIM_STATES.search(path.name)
        if match and int(match[2]) == tensor:
            by_rank[int(match[1])] = path
    if not by_rank:
        return
    optimizers = [read_pickle(by_rank[rank])["optimizer_state_dict"] for rank in sorted(by_rank)]
    first = optimizers[0]
    count = first.get("partition_count", len(optimizers))  # a number, or a list with that of each optimizer group
    if max(count if isinstance(count, list) else [count]) != len(optimizers):
        raise TextmillError(f"{folder}: {len(optimizers)} of {count} optim_states files found; all are needed")
    if "fp32_flat_groups" in first:
        rows = [torch.cat([group.flatten() for group in one["fp32_flat_groups"]]) for one in optimizers]
        yield from _join_zero_3(states["param_shapes"], rows, folder)
    elif "single_partition_of_fp32_groups" in first:
        groups = [one["single_partition_of_fp32_groups"] for one in optimizers]
        yield from _join_zero_1_and_2(
            states["param_shapes"], groups, first.get("param_alignment_paddings") or [], folder
        )


def _join_zero_1_and_2(
    shapes: list[Tree], groups_by_rank: list[list[Tensor]], paddings: list[list[int]], where: Path
) -> Iterator[tuple[str, Tensor]]:
    """ZeRO-1 and 2: the weights of a group in a row, cut into one equal part per rank."""
    for group, sizes in enumerate(shapes):
        flat = torch.cat([groups[group].flatten() for groups in groups_by_rank])
        start = 0
        for place, (name, size) in enumerate(sizes.items()):
            end = start + math.prod(size)
            yield name, _shaped(flat[start : min(len(flat), end)], name, size, where)
            start = end + (int(paddings[group][place]) if paddings else 0)


def _join_zero_3(shapes: list[Tree], rows: list[Tensor], where: Path) -> Iterator[tuple[str, Tensor]]:
    """ZeRO-3: each weight cut into one part per rank, the last part padded; a rank stores its parts in a row."""
    start = 0
    for sizes in shapes:
        for name, size in sizes.items():
            size_per_rank = min(-(-math.prod(size) // len(rows)), len(rows[0]) - start)
            parts = [row[start : start + size_per_rank] for row in rows]
            yield name, _shaped(torch.cat(parts)[: math.prod(size)], name, size, where)
            start += size_per_rank


def _shaped(flat: Tensor, name: str, size: tuple[int, ...], where: Path) -> Tensor:
    if len(flat) != math.prod(size):
        raise TextmillError(
            f"{where}: '{name}' is {list(size)}, but its fp32 master weights end after {len(flat)} numbers; the "
            "files are damaged"
        )
    return flat.view(tuple(size))


def tagged_folder(checkpoint: Path) -> Path:
    """The folder of a tag: the one given, or the one that the file `latest` names."""
    if not checkpoint.is_dir():
        raise TextmillError(f"{checkpoint}: no such folder")
    if not (latest := checkpoint / LATEST).is_file():
        return checkpoint
    tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if Path(tag).name != tag or not (checkpoint / tag).is_dir():
        raise TextmillError(f"{latest}: names '{tag}', which is not a folder next to it; name the tag's folder itself")
    return checkpoint / tag
