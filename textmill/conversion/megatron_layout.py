"""How Megatron lays out a GPT-2: names, what tensor-parallel ranks divide, the order of queries, keys and values.

With tensor-parallel size 2 and pipeline-parallel size 2, a checkpoint of 12 layers is four files:

    release/mp_rank_00_000/model_optim_rng.pt    the first half of each matrix, layers 0 to 5, the embeddings
    release/mp_rank_01_000/model_optim_rng.pt    the second half of the same
    release/mp_rank_00_001/model_optim_rng.pt    the first half, layers 6 to 11 (named layers.0 to layers.5 again),
                                                 the final norm, the head or a copy of the token embedding
    release/mp_rank_01_001/model_optim_rng.pt    the second half of the same
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from textmill.conversion.model import Array
from textmill.errors import TextmillError

MODULES = {
    "input_layernorm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
}
"""Megatron's modules of a block and those of GPT-2."""
OUTSIDE = {
    "embedding.word_embeddings": "wte",
    "embedding.position_embeddings": "wpe",
    "final_layernorm": "ln_f",
    "output_layer": "lm_head",
}
"""The same outside the blocks."""
_GPT2_MODULES = {gpt2: megatron for megatron, gpt2 in MODULES.items()}
_GPT2_OUTSIDE = {gpt2: megatron for megatron, gpt2 in OUTSIDE.items()}
ROWS = ("attention.query_key_value", "mlp.dense_h_to_4h")
COLUMNS = ("attention.dense", "mlp.dense_4h_to_h")
"""Matrices whose outputs, and whose inputs, are divided among tensor-parallel ranks."""
VOCABULARY = ("embedding.word_embeddings", "output_layer")
"""Matrices whose rows are tokens, padded and divided among tensor-parallel ranks."""
QKV = "attention.query_key_value"
ORDERS = {"0": (0, 1, 2), "1.0": (1, 2, 0), "2.0": (1, 0, 2), "3.0": (1, 0, 2)}
"""By checkpoint version, the order of the axes [3, heads, head width] in the rows of a rank's query_key_value."""


def to_megatron_name(name: str) -> tuple[int | None, str, str]:
    """The layer, Megatron's module and the ending of a weight of GPT-2; the layer is None outside the blocks.

    transformer.h.3.attn.c_attn.weight -> (3, "attention.query_key_value", "weight")
    """
    stem, _, ending = name.removeprefix("transformer.").rpartition(".")
    if block := re.fullmatch(r"h\.(\d+)\.(.+)", stem):
        return int(block[1]), _GPT2_MODULES[block[2]], ending
    return None, _GPT2_OUTSIDE[stem], ending


def to_gpt2_name(layer: int | None, module: str, ending: str) -> str | None:
    """The inverse of `to_megatron_name`; None if Megatron's GPT-2 has no such module."""
    gpt2_module = (OUTSIDE if layer is None else MODULES).get(module)
    if gpt2_module is None:
        return None
    if layer is not None:
        return f"transformer.h.{layer}.{gpt2_module}.{ending}"
    return f"{'' if module == 'output_layer' else 'transformer.'}{gpt2_module}.{ending}"


def order_of(version: Any, where: str) -> tuple[int, int, int]:
    """The order of the axes of a checkpoint version; a checkpoint without one is of version 0."""
    if version is None:
        return ORDERS["0"]
    if isinstance(version, int | float) and not isinstance(version, bool):
        if version in (0, 1):
            return ORDERS["0" if version == 0 else "1.0"]
        if 2 <= version < 4:
            return ORDERS["3.0"]
    raise TextmillError(
        f"{where}: its checkpoint_version is {version!r}, so the order of queries, keys and values is not known; "
        "Megatron has 0, 1.0, 2.0 and 3.0"
    )


def to_version_order(values: Array, heads: int, order: tuple[int, int, int]) -> Array:
    """Rows [3, heads, head width] in the order of a checkpoint version."""
    split = values.reshape(3, heads, -1, *values.shape[1:])
    return np.ascontiguousarray(split.transpose(*order, *range(3, split.ndim))).reshape(values.shape)


def from_version_order(values: Array, heads: int, order: tuple[int, int, int], where: str) -> Array:
    """The inverse of `to_version_order`."""
    if len(values) % (3 * heads):
        raise TextmillError(f"{where}: {len(values):,} rows of query_key_value are not those of {heads} heads")
    sizes = (3, heads, len(values) // (3 * heads))
    split = values.reshape(*(sizes[axis] for axis in order), *values.shape[1:])
    ordered = split.transpose(*np.argsort(order).tolist(), *range(3, split.ndim))
    return np.ascontiguousarray(ordered).reshape(values.shape)


def rank_folder(tensor: int, pipeline: int, pipelines: int) -> str:
    """The folder of a rank: mp_rank_TT, with pipeline parallelism mp_rank_TT_PPP."""
    return f"mp_rank_{tensor:02d}" + (f"_{pipeline:03d}" if pipelines > 1 else "")


def flatten(tree: Any, prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """A nested state dict with dotted names: {"mlp": {"bias": x}} -> {"mlp.bias": x}; Megatron nests by module."""
    if not isinstance(tree, dict) or depth > 8:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(name, str):
            flat |= flatten(value, f"{prefix}.{name}" if prefix else name, depth + 1)
    return flat


def find_ranks(folder: Path) -> dict[tuple[int, int], Path]:
    """The files of all ranks by (tensor, pipeline)."""
    ranks = {}
    for path in sorted(folder.glob("mp_rank_*/model_optim_rng.pt")):
        numbers = path.parent.name.removeprefix("mp_rank_").split("_")
        if all(number.isdigit() for number in numbers) and len(numbers) <= 2:
            ranks[int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else 0] = path
    return ranks


class ParallelSizes(NamedTuple):
    """How many ranks divide each matrix, and how many divide the layers."""

    tensor: int
    pipeline: int


def count_ranks(ranks: dict[tuple[int, int], Path], args: dict[str, Any], folder: Path) -> ParallelSizes:
    """The tensor- and pipeline-parallel size; an error names a file that is missing."""
    tensor_size = max(
        1 + max(tensor for tensor, _ in ranks),
        _recorded_size(args, "tensor_model_parallel_size", "model_parallel_size"),
    )
    pipeline_size = max(
        1 + max(pipeline for _, pipeline in ranks), _recorded_size(args, "pipeline_model_parallel_size")
    )
    missing = []
    for pipeline in range(pipeline_size):
        for tensor in range(tensor_size):
            if (tensor, pipeline) not in ranks:
                missing.append(rank_folder(tensor, pipeline, pipeline_size))
    if missing:
        raise TextmillError(
            f"{folder}: lacks {len(missing)} of {tensor_size * pipeline_size} ranks, such as "
            f"{missing[0]}/model_optim_rng.pt; copy the files of all ranks"
        )
    return ParallelSizes(tensor_size, pipeline_size)


def _recorded_size(args: dict[str, Any], *names: str) -> int:
    """A parallel size among Megatron's arguments, under the first of these names; 0 if there is none."""
    size: int = next((args[name] for name in names if type(args.get(name)) is int), 0)
    return size if 1 <= size < 10_000 else 0
