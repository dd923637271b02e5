"""How Megatron lays out a GPT-2: names, what tensor-parallel ranks divide, the order of queries, keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from textmill.conversion.model import Array
from textmill.errors import TextmillError

MODULES = {
    "input_layernorm": "ln_1", "attention.query_key_value": "attn.c_attn", "attention.dense": "attn.c_proj",
    "post_attention_layernorm": "ln_2", "mlp.dense_h_to_4h": "mlp.c_fc", "mlp.dense_4h_to_h": "mlp.c_proj",
}  # fmt: skip
"""Megatron's modules of a block and those of GPT-2."""
OUTSIDE = {
    "embedding.word_embeddings": "wte", "embedding.position_embeddings": "wpe", "final_layernorm": "ln_f",
    "output_layer": "lm_head",
}  # fmt: skip
"""The same outside the blocks."""
ROWS, COLUMNS = ("attention.query_key_value", "mlp.dense_h_to_4h"), ("attention.dense", "mlp.dense_4h_to_h")
"""Matrices whose outputs, and whose inputs, are divided among tensor-parallel ranks."""
VOCABULARY = ("embedding.word_embeddings", "output_layer")
"""Matrices whose rows are tokens, padded and divided among tensor-parallel ranks."""
QKV = "attention.query_key_value"
ORDERS = {"0": (0, 1, 2), "1.0": (1, 2, 0), "2.0": (1, 0, 2), "3.0": (1, 0, 2)}
"""By checkpoint version, the order of the axes [3, heads, head width] in the rows of a rank's query_key_value."""


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
    back = split.transpose(*np.argsort(order).tolist(), *range(3, split.ndim))
    return np.ascontiguousarray(back).reshape(values.shape)


def rank_folder(tensor: int, pipeline: int, pipelines: int) -> str:
    """The folder of a rank: mp_rank_TT, with pipeline parallelism mp_rank_TT_PPP."""
    return f"mp_rank_{tensor:02d}" + (f"_{pipeline:03d}" if pipelines > 1 else "")


def flatten(tree: Any, prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """A nested state dict with dotted names; Megatron nests by module."""
    if not isinstance(tree, dict) or depth > 8:
        return {prefix: tree}
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(name, str):
            found |= flatten(value, f"{prefix}.{name}" if prefix else name, depth + 1)
    return found


def find_ranks(folder: Path) -> dict[tuple[int, int], Path]:
    """The files of all ranks by (tensor, pipeline)."""
    found = {}
    for path in sorted(folder.glob("mp_rank_*/model_optim_rng.pt")):
        numbers = path.parent.name.removeprefix("mp_rank_").split("_")
        if all(number.isdigit() for number in numbers) and len(numbers) <= 2:
            found[int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else 0] = path
    return found


def count_ranks(ranks: dict[tuple[int, int], Path], args: dict[str, Any], folder: Path) -> tuple[int, int]:
    """The tensor- and pipeline-parallel size; an error names a file that is missing."""
    tensor, pipeline = (1 + max(one[axis] for one in ranks) for axis in (0, 1))
    for axis, names in enumerate(
        (("tensor_model_parallel_size", "model_parallel_size"), ("pipeline_model_parallel_size",))
    ):
        stated = next((args[name] for name in names if type(args.get(name)) is int), None)
        if stated is not None and 1 <= stated < 10_000:
            tensor, pipeline = (max(tensor, stated), pipeline) if axis == 0 else (tensor, max(pipeline, stated))
    missing = [rank_folder(t, p, pipeline) for p in range(pipeline) for t in range(tensor) if (t, p) not in ranks]
    if missing:
        raise TextmillError(
            f"{folder}: lacks {len(missing)} of {tensor * pipeline} ranks, such as {missing[0]}/model_optim_rng.pt; "
            "copy the files of all ranks"
        )
    return tensor, pipeline
