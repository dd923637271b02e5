"""Megatron-LM's checkpoints of a GPT-2: any tensor- and pipeline-parallel size, versions 0 to 3; read only.

Nothing is written: Megatron's present tools start from a folder of `hf`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from textmill.conversion.formats.hf import read_hf_shape
from textmill.conversion.model import Array, Hints, Model, check_layers, collect_weights
from textmill.conversion.torch_files import read_tree, to_array
from textmill.errors import TextmillError, warn
from textmill.models import open_family
from textmill.storage.tensor_files import Named

PRECISIONS: tuple[str, ...] = ()
States = dict[tuple[int, int], dict[str, Array]]
"""The weights of each rank by Megatron's names."""
FILE = "model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"


def matches(path: Path) -> bool:
    """A folder with Megatron's tracker file, or that of an iteration."""
    return path.is_dir() and ((path / TRACKER).is_file() or bool(find_ranks(path)))


def read(path: Path, hints: Hints) -> Model:
    """Read and join the files of all ranks."""
    folder = _iteration_folder(path)
    ranks = find_ranks(folder)
    if not ranks:
        raise TextmillError(f"{folder}: has no mp_rank_NN/{FILE}; name a folder that Megatron saved")
    trees = {rank: read_tree(file) for rank, file in ranks.items()}
    args = plain_args(trees[min(trees)].get("args"))
    sizes = count_ranks(ranks, args, folder)
    states = {rank: state_of(tree, ranks[rank]) for rank, tree in trees.items()}
    return join_ranks(path, folder, states, sizes, args, trees[min(trees)].get("checkpoint_version"), hints)


def join_ranks(
    path: Path, folder: Path, states: States, sizes: ParallelSizes, args: dict[str, Any], version: Any, hints: Hints
) -> Model:
    """The model of all ranks' weights, by (tensor, pipeline)."""
    shape = _shape_of(path, args, states, sizes, hints)
    if shape.heads % sizes.tensor:
        raise TextmillError(f"{folder}: {sizes.tensor} tensor-parallel ranks do not divide {shape.heads} heads")
    order = order_of(version, str(folder))
    check_layers(shape, sum(map(len, states.values())), str(folder))
    weights = collect_weights(shape, _join_weights(states, sizes, shape, order, folder), str(folder), padded=True)
    return Model(shape, weights, hints.open_tokenizer(path))


def _iteration_folder(path: Path) -> Path:
    if not (path / TRACKER).is_file():
        return path
    text = (path / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    name = text if text == RELEASE else f"iter_{int(text):07d}" if text.isdigit() and len(text) < 12 else None
    if name is None or not (path / name).is_dir():
        raise TextmillError(f"{path / TRACKER}: names '{text[:40]}', which is no folder next to it")
    return path / name


def plain_args(args: Any) -> dict[str, Any]:
    """Megatron's arguments; empty if the file has none, as the oldest do."""
    values = args if isinstance(args, dict) else getattr(args, "__dict__", {})
    return {name: value for name, value in values.items() if isinstance(value, int | float | str)}


def state_of(tree: dict[str, Any], path: Path) -> dict[str, Array]:
    """The weights of a rank by Megatron's names, without what different versions put around them."""
    if "model0" in tree:
        raise TextmillError(f"{path}: was saved with virtual pipeline stages, which are not read; save without them")
    weights = {}
    for name, value in flatten(tree.get("model")).items():
        if isinstance(value, Tensor) and value.is_floating_point():
            short_name = re.sub(r"^(module\.|language_model\.|transformer\.|encoder\.)+", "", name)
            weights[short_name.replace("self_attention.", "attention.")] = to_array(value)
    if not weights:
        raise TextmillError(f"{path}: has no weights under 'model'; it is not a checkpoint of Megatron")
    return weights


def _shape_of(path: Path, args: dict[str, Any], states: Any, sizes: ParallelSizes, hints: Hints) -> Any:
    config = hints.config or (path if (path / "config.json").is_file() else None)
    table = states[0, 0].get("embedding.word_embeddings.weight")
    positions = states[0, 0].get("embedding.position_embeddings.weight")
    if table is None or positions is None or table.ndim != 2 or positions.ndim != 2:
        raise TextmillError(f"{path}: its first rank has no word and position embeddings; it is not a GPT-2")
    rows = len(table) * sizes.tensor
    if (stated := args.get("padded_vocab_size", rows)) != rows:
        raise TextmillError(
            f"{path}: its padded vocabulary is {rows:,} rows on {sizes.tensor} ranks, its arguments say {stated}; "
            "a rank is missing, or files of different checkpoints are mixed"
        )
    if config is not None:
        shape = read_hf_shape(config, "gpt2")
    else:
        is_tied = "output_layer.weight" not in states[0, sizes.pipeline - 1]
        layers = [_layer_of(name) or 0 for pipeline in range(sizes.pipeline) for name in states[0, pipeline]]
        hf_config = _hf_config(args, hints, rows, positions, max(layers, default=0))
        shape = open_family("gpt2").shape_of_hf({**hf_config, "tie_word_embeddings": is_tied}, str(path))
    vocab = hints.vocab or (shape.vocab if config is not None else rows)
    if vocab > rows:
        raise TextmillError(f"{path}: has {rows:,} rows of embeddings, fewer than the vocabulary of {vocab:,}")
    if config is None and hints.vocab is None:
        warn(f"{path}: keeps all {rows:,} rows of its padded vocabulary; give the real size with --vocab N")
    return shape


def _hf_config(args: dict[str, Any], hints: Hints, rows: int, positions: Array, last_layer: int) -> dict[str, Any]:
    """A config.json from the arguments, or from the sizes of the weights where the file has no arguments."""
    heads = hints.heads or args.get("num_attention_heads")
    if heads is None:
        raise TextmillError("import: this checkpoint does not say how many attention heads there are; add --heads N")
    activation = "gelu_new" if args.get("bias_gelu_fusion", True) or args.get("openai_gelu") else "gelu"
    dropout = args.get("hidden_dropout", 0.1)
    return {
        "n_layer": args.get("num_layers", last_layer + 1),
        "n_head": heads,
        "n_embd": positions.shape[1],
        "n_positions": len(positions),
        "n_inner": args.get("ffn_hidden_size"),
        "vocab_size": hints.vocab or rows,
        "activation_function": hints.activation or activation,
        "embd_pdrop": dropout,
        "resid_pdrop": dropout,
        "attn_pdrop": args.get("attention_dropout", 0.1),
        "layer_norm_epsilon": args.get("layernorm_epsilon", 1e-5),
    }


def _join_weights(states: States, sizes: ParallelSizes, shape: Any, order: Any, where: Path) -> Iterator[Named]:
    """Every weight under GPT-2's name, the slices of all ranks joined, the layers counted over all pipeline stages."""
    transposed = {weight.name: weight.transposed for weight in shape.weights()}
    earlier_layers = 0  # those of the pipeline stages before
    for pipeline in range(sizes.pipeline):
        names = [name for name in states[0, pipeline] if not name.startswith("word_embeddings_for_head")]
        for name in names:
            slices: list[Any] = [states[tensor, pipeline].get(name) for tensor in range(sizes.tensor)]
            if any(values is None or values.shape != slices[0].shape for values in slices):
                raise TextmillError(f"{where}: '{name}' differs in size between ranks, or a rank lacks it")
            layer = _layer_of(name)
            module, _, ending = re.sub(r"^layers\.\d+\.", "", name).rpartition(".")
            values = _join_slices(slices, module, ending, shape.heads // sizes.tensor, order, str(where))
            gpt2_name = to_gpt2_name(None if layer is None else earlier_layers + layer, module, ending)
            if gpt2_name is None:
                raise TextmillError(f"{where}: has '{name}', which Megatron's GPT-2 does not have")
            is_turned = transposed.get(gpt2_name) and values.ndim == 2
            yield gpt2_name, np.ascontiguousarray(values.T) if is_turned else values
        earlier_layers += len({_layer_of(name) for name in names} - {None})


def _layer_of(name: str) -> int | None:
    """layers.3.mlp.dense_h_to_4h.bias -> 3; None outside the blocks."""
    match = re.match(r"layers\.(\d+)\.", name)
    return int(match[1]) if match else None


def _join_slices(slices: list[Array], module: str, ending: str, heads: int, order: Any, where: str) -> Array:
    """A weight from the slices of the tensor-parallel ranks; what these do not divide is the same on all."""
    if module == QKV:
        by_rank = [from_version_order(values, heads, order, where) for values in slices]
        qkv = np.concatenate([values.reshape(3, -1, *values.shape[1:]) for values in by_rank], axis=1)
        return qkv.reshape(-1, *qkv.shape[2:])
    if module in (*ROWS, *VOCABULARY):
        return np.concatenate(slices)
    return np.concatenate(slices, axis=1) if module in COLUMNS and ending == "weight" else slices[0]


MODULES = {
    "input_layernorm": "ln_1",
    "attention.query_key_value": "attn.c_attn",
    "attention.dense": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.dense_h_to_4h": "mlp.c_fc",
    "mlp.dense_4h_to_h": "mlp.c_proj",
    "embedding.word_embeddings": "wte",
    "embedding.position_embeddings": "wpe",
    "final_layernorm": "ln_f",
    "output_layer": "lm_head",
}
"""Megatron's modules and those of GPT-2."""
ROWS = ("attention.query_key_value", "mlp.dense_h_to_4h")
COLUMNS = ("attention.dense", "mlp.dense_4h_to_h")
"""Matrices whose outputs, and whose inputs, are divided among tensor-parallel ranks."""
VOCABULARY = ("embedding.word_embeddings", "output_layer")
"""Matrices whose rows are tokens, padded and divided among tensor-parallel ranks."""
QKV = "attention.query_key_value"


def to_gpt2_name(layer: int | None, module: str, ending: str) -> str | None:
    """The name of a weight; None if Megatron's GPT-2 has no such module.

    (3, "attention.query_key_value", "weight") -> transformer.h.3.attn.c_attn.weight
    """
    block = "" if layer is None else f"h.{layer}."
    prefix = "" if module == "output_layer" else "transformer."
    return f"{prefix}{block}{MODULES[module]}.{ending}" if module in MODULES else None


def order_of(version: Any, where: str) -> tuple[int, int, int]:
    """The order of the axes [3, heads, head width] in the rows of a rank's query_key_value, by checkpoint version.

    A checkpoint without a version is of version 0.
    """
    number = 0 if version is None else version
    if type(number) in (int, float) and (number in (0, 1) or 2 <= number < 4):
        return (0, 1, 2) if number == 0 else (1, 2, 0) if number == 1 else (1, 0, 2)
    raise TextmillError(
        f"{where}: its checkpoint_version is {version!r}, so the order of queries, keys and values is not known; "
        "Megatron has 0, 1.0, 2.0 and 3.0"
    )


def from_version_order(values: Array, heads: int, order: tuple[int, int, int], where: str) -> Array:
    """Rows [3, heads, head width] from the order of a checkpoint version."""
    if len(values) % (3 * heads):
        raise TextmillError(f"{where}: {len(values):,} rows of query_key_value are not those of {heads} heads")
    sizes = (3, heads, len(values) // (3 * heads))
    split = values.reshape(*(sizes[axis] for axis in order), *values.shape[1:])
    ordered = split.transpose(*np.argsort(order).tolist(), *range(3, split.ndim))
    return np.ascontiguousarray(ordered).reshape(values.shape)


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
    for path in sorted(folder.glob(f"mp_rank_*/{FILE}")):
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
    wanted = [(tensor, pipeline) for pipeline in range(pipeline_size) for tensor in range(tensor_size)]
    if missing := [rank for rank in wanted if rank not in ranks]:
        tensor, pipeline = missing[0]
        name = f"mp_rank_{tensor:02d}" + (f"_{pipeline:03d}" if pipeline_size > 1 else "")
        raise TextmillError(
            f"{folder}: lacks {len(missing)} of {len(wanted)} ranks, such as {name}/{FILE}; copy the files of all ranks"
        )
    return ParallelSizes(tensor_size, pipeline_size)


def _recorded_size(args: dict[str, Any], *names: str) -> int:
    """A parallel size among Megatron's arguments, under the first of these names; 0 if there is none."""
    size: int = next((args[name] for name in names if type(args.get(name)) is int), 0)
    return size if 1 <= size < 10_000 else 0
