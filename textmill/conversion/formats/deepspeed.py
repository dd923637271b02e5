"""DeepSpeed's checkpoints: one tag with the module's weights is written, ZeRO 0 to 3 are read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from textmill.config import ExportConfig
from textmill.conversion.formats import megatron
from textmill.conversion.formats.hf import read_hf_shape, text_files
from textmill.conversion.formats.megatron import ParallelSizes, flatten
from textmill.conversion.model import Files, Hints, Model, collect_weights, require_family
from textmill.conversion.torch_files import read_pickle, to_array, to_tensor, write_torch_file
from textmill.errors import TextmillError
from textmill.storage.files import write_bytes, write_text
from textmill.storage.tensor_files import Named
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

PRECISIONS = ("fp32", "bf16", "fp16")
Module = tuple[dict[str, Any], dict[str, Any]]
"""A rank's weights, and what its file has next to them."""
TAG = "global_step0"
LATEST = "latest"
PREFIX = re.compile(r"^.*?(?=(transformer|lm_head)\.)")
"""What wrappers put before the name of a weight, such as module. or model."""


def write(model: Model, folder: Path, config: ExportConfig) -> Files:
    """Write what `engine.load_checkpoint(folder, load_module_only=True)` opens for transformers' GPT-2.

    With `export.megatron.tensor` above 1, for Megatron-DeepSpeed: the modules of Megatron, one file per rank.
    """
    require_family(model.shape, "deepspeed", "gpt2")
    (folder / TAG).mkdir(exist_ok=True)
    ranks = config.megatron.tensor
    if config.megatron.pipeline > 1:
        raise TextmillError("export.megatron.pipeline: deepspeed is written for one pipeline stage; use megatron")
    modules = [_module(model, config)] if ranks == 1 else _megatron_modules(model, config)
    files = {}
    for tensor, (module, more) in enumerate(modules):
        states: dict[str, object] = {
            "module": module,
            "buffer_names": [],
            "param_shapes": None,
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": {},
            "optimizer": None,
            "lr_scheduler": None,
            "sparse_tensor_module_names": set(),
            "skipped_steps": 0,
            "global_steps": 0,
            "global_samples": 0,
            "dp_world_size": 1,
            "mp_world_size": ranks,
            "ds_config": {},
            "ds_version": "0",
            **more,
        }
        files[f"{TAG}/{states_name(tensor)}"] = write_torch_file(folder / TAG / states_name(tensor), states)
    files[LATEST] = write_text(folder / LATEST, TAG)
    texts = text_files(model.shape, model.tokenizer, config.precision)
    return files | {name: write_bytes(folder / name, [text.encode()]) for name, text in texts.items()}


def _module(model: Model, config: ExportConfig) -> Module:
    module: dict[str, Any] = {name: to_tensor(values, config.precision) for name, values in model.weights.items()}
    module.setdefault("lm_head.weight", module["transformer.wte.weight"])
    return module, {}


def _megatron_modules(model: Model, config: ExportConfig) -> Iterator[Module]:
    """The modules of each tensor-parallel rank, and what Megatron saves next to them."""
    megatron.check_parallel(model.shape, config)
    for tensor in range(config.megatron.tensor):
        tree = megatron.rank_tree(model, config, tensor, 0)
        yield tree.pop("model"), tree


def matches(path: Path) -> bool:
    """A folder with a tag named in `latest`, or that of a tag."""
    return path.is_dir() and ((path / LATEST).is_file() or any(path.glob("*mp_rank_*_model_states.pt")))


def read(path: Path, hints: Hints) -> Model:
    """Read a checkpoint; its sizes are in a config.json, which DeepSpeed does not write."""
    tag = tagged_folder(path)
    if (tensor := count_tensor_ranks(path)) > 1:
        return _read_tensor_parallel(path, tensor, hints)
    config = hints.config or next((one for one in (path, tag, tag.parent) if (one / "config.json").is_file()), None)
    if config is None:
        raise TextmillError(
            f"{path}: DeepSpeed does not record the sizes of a model; name its config.json: --config FILE"
        )
    shape = read_hf_shape(config, "gpt2")
    weights = collect_weights(shape, _named(path), str(path))
    folder = hints.tokenizer or (path if (path / "tokenizer.json").is_file() else None)
    return Model(shape, weights, open_tokenizer(folder) if folder else None)


def _read_tensor_parallel(path: Path, count: int, hints: Hints) -> Model:
    """Read what Megatron-DeepSpeed saved: Megatron's modules on each rank, without pipeline parallelism."""
    states = {}
    for tensor in range(count):
        states[tensor, 0] = megatron.state_of({"model": read_weights(path, tensor)}, path)
    first, _ = read_states(path)
    args = megatron.plain_args(first.get("args"))
    return megatron.join_ranks(
        path, path, states, ParallelSizes(count, 1), args, first.get("checkpoint_version"), hints
    )


def _named(path: Path) -> Iterator[Named]:
    for name, value in read_weights(path).items():
        yield PREFIX.sub("", name), to_array(value)


Tree = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
OPTIM_STATES = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
"""The file of a data-parallel rank and a tensor-parallel rank."""


def states_name(tensor: int = 0) -> str:
    """The file with the weights of a tensor-parallel rank."""
    return f"mp_rank_{tensor:02d}_model_states.pt"


def count_tensor_ranks(checkpoint: Path) -> int:
    """The tensor-parallel size: that of the highest rank that has a file."""
    ranks = [0]
    for path in tagged_folder(checkpoint).iterdir():
        if match := re.search(r"mp_rank_(\d+)_model_states\.pt$", path.name):
            ranks.append(int(match[1]))
    return 1 + max(ranks)


def read_states(checkpoint: Path, tensor: int = 0) -> tuple[Tree, Path]:
    """The file with the weights of a tensor-parallel rank, and where it is."""
    folder = tagged_folder(checkpoint)
    name = states_name(tensor)
    model = folder / name if (folder / name).is_file() else folder / f"zero_pp_rank_0_{name}"
    if not model.is_file():
        raise TextmillError(f"{folder}: no {name} found; name a folder that DeepSpeed's save_checkpoint wrote")
    return _tree(read_pickle(model), "its content", model), model


def read_weights(checkpoint: Path, tensor: int = 0) -> dict[str, Tensor]:
    """All weights of a tensor-parallel rank by DeepSpeed's names; fp32 master weights where they exist."""
    folder = tagged_folder(checkpoint)
    optimizer_files = _find_optimizer_files(folder, tensor)
    states, states_file = read_states(checkpoint, tensor)
    module = _tree({} if states.get("module") is None else states["module"], "module", states_file)
    weights = {
        name: value
        for name, value in flatten(module).items()
        if isinstance(name, str) and isinstance(value, Tensor) and value.numel()
    }
    if not optimizer_files:
        return weights
    optimizers = [_read_optimizer(path) for path in optimizer_files]
    _check_partition_count(optimizers, optimizer_files[0], folder)
    join: Callable[..., Iterator[tuple[str, Tensor]]]
    if "fp32_flat_groups" in optimizers[0]:
        key = "fp32_flat_groups"
        join = _join_zero_3
    elif "single_partition_of_fp32_groups" in optimizers[0]:
        key = "single_partition_of_fp32_groups"
        join = _join_zero_1_and_2
    else:
        return weights
    flat_by_rank = [_tensors(tree.get(key), key, path) for tree, path in zip(optimizers, optimizer_files, strict=True)]
    shapes = _shapes(states.get("param_shapes"), states_file)
    paddings = optimizers[0].get("param_alignment_paddings")
    return {**weights, **dict(join(shapes, flat_by_rank, paddings, folder))}


def _find_optimizer_files(folder: Path, tensor: int) -> list[Path]:
    """The files of ZeRO's partitions of a tensor-parallel rank, in the order of the data-parallel ranks."""
    by_rank: list[tuple[int, Path]] = []
    for path in folder.iterdir():
        match = OPTIM_STATES.search(path.name)
        if match and int(match[2]) == tensor:
            by_rank.append((int(match[1]), path))
    return [path for _, path in sorted(by_rank)]


def _read_optimizer(path: Path) -> Tree:
    content = _tree(read_pickle(path), "its content", path)
    return _tree(content.get("optimizer_state_dict"), "optimizer_state_dict", path)


def _check_partition_count(optimizers: list[Tree], first_file: Path, folder: Path) -> None:
    """Refuse a checkpoint that lacks files; the count is a number, or a list with that of each optimizer group."""
    count = optimizers[0].get("partition_count", len(optimizers))
    counts = count if isinstance(count, list) else [count]
    if not counts or not all(type(number) is int for number in counts):
        raise _damaged(first_file, "partition_count", count, "a number")
    if max(counts) != len(optimizers):
        raise TextmillError(f"{folder}: {len(optimizers)} of {count} optim_states files found; all are needed")


def _tree(value: Any, what: str, where: Path) -> Tree:
    if not isinstance(value, dict):
        raise _damaged(where, what, value, "a dict")
    return value


def _tensors(value: Any, what: str, where: Path) -> list[Tensor]:
    if not isinstance(value, list) or not all(isinstance(tensor, Tensor) for tensor in value):
        raise _damaged(where, what, value, "a list of tensors")
    return [tensor.flatten() for tensor in value]


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


def _damaged(where: Path, what: str, value: Any, expected: str) -> TextmillError:
    return TextmillError(
        f"{where}: {what} is a {type(value).__name__}, DeepSpeed saves {expected} there; the file is damaged, or not "
        "from DeepSpeed"
    )


def _join_zero_1_and_2(
    shapes: list[Shapes], flat_by_rank: list[list[Tensor]], paddings: Any, where: Path
) -> Iterator[tuple[str, Tensor]]:
    """ZeRO-1 and 2: the weights of a group in a row, cut into one equal part per rank."""
    for group, sizes in enumerate(shapes):
        parts = [flat_groups[group] for flat_groups in flat_by_rank if group < len(flat_groups)]
        flat = torch.cat([torch.empty(0), *parts])
        start = 0
        for place, (name, size) in enumerate(sizes.items()):
            end = start + math.prod(size)
            yield name, _shaped(flat[start : min(len(flat), end)], name, size, where)
            start = end + _padding(paddings, group, place, where)


def _padding(paddings: Any, group: int, place: int, where: Path) -> int:
    """How many padding numbers follow a weight."""
    if paddings is None or (isinstance(paddings, list) and not paddings):
        return 0
    try:
        return int(paddings[group][place])
    except (LookupError, TypeError, ValueError, OverflowError):
        raise _damaged(where, "param_alignment_paddings", paddings, "a list of lists of numbers") from None


def _join_zero_3(
    shapes: list[Shapes], flat_by_rank: list[list[Tensor]], _: Any, where: Path
) -> Iterator[tuple[str, Tensor]]:
    """ZeRO-3: each weight cut into one part per rank, the last part padded; a rank stores its parts in a row."""
    rows = [torch.cat([torch.empty(0), *flat_groups]) for flat_groups in flat_by_rank]
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
