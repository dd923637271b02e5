"""DeepSpeed's checkpoints: one tag with the module's weights is written, ZeRO 0 to 3 are read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from textmill.config import ExportConfig
from textmill.conversion.formats import megatron
from textmill.conversion.formats.hf import read_hf_shape, text_files
from textmill.conversion.megatron_layout import ParallelSizes
from textmill.conversion.model import Files, Hints, Model, collect_weights, require_family
from textmill.conversion.torch_files import to_array, to_tensor, write_torch_file
from textmill.conversion.zero_partitions import (
    count_tensor_ranks,
    read_states,
    read_weights,
    states_name,
    tagged_folder,
)
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
