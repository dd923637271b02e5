"""Megatron-LM's checkpoints of a GPT-2: any tensor- and pipeline-parallel size, versions 0 to 3, padded vocabulary."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from textmill.config import ExportConfig
from textmill.conversion.formats.hf import read_hf_shape, text_files
from textmill.conversion.megatron_layout import (
    COLUMNS,
    MODULES,
    ORDERS,
    OUTSIDE,
    QKV,
    ROWS,
    VOCABULARY,
    count_ranks,
    find_ranks,
    flatten,
    from_version_order,
    order_of,
    rank_folder,
    to_version_order,
)  # fmt: skip
from textmill.conversion.model import Array, Files, Hints, Model, collect_weights, require_family, require_gelu
from textmill.conversion.torch_files import read_tree, to_array, to_tensor, write_torch_file
from textmill.errors import TextmillError, warn
from textmill.models import open_family, weights_of
from textmill.storage.files import write_bytes, write_text
from textmill.storage.tensor_files import Named
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

PRECISIONS = ("fp32", "bf16", "fp16")
States = dict[tuple[int, int], dict[str, Array]]
"""The weights of each rank by Megatron's names."""
FILE, TRACKER, RELEASE = "model_optim_rng.pt", "latest_checkpointed_iteration.txt", "release"


def write(model: Model, folder: Path, config: ExportConfig) -> Files:
    """Write a release checkpoint (weights only, iteration 0), which Megatron's `--load` opens, one file per rank."""
    shape, settings = model.shape, config.megatron
    check_parallel(shape, config)
    files = {}
    for pipeline in range(settings.pipeline):
        for tensor in range(settings.tensor):
            rank = f"{RELEASE}/{rank_folder(tensor, pipeline, settings.pipeline)}"
            (folder / rank).mkdir(parents=True, exist_ok=True)
            tree = rank_tree(model, config, tensor, pipeline)
            files[f"{rank}/{FILE}"] = write_torch_file(folder / rank / FILE, tree)
    files[TRACKER] = write_text(folder / TRACKER, RELEASE)
    texts = text_files(shape, model.tokenizer, config.precision)
    return files | {name: write_bytes(folder / name, [text.encode()]) for name, text in texts.items()}


def check_parallel(shape: Any, config: ExportConfig) -> None:
    """Refuse a model that Megatron does not have, or whose sizes the ranks do not divide."""
    settings = config.megatron
    require_family(shape, "gpt2", "megatron")
    require_gelu(shape, "megatron")
    for name, size, parts in (
        ("heads", shape.heads, settings.tensor), ("inner", shape.inner, settings.tensor),
        ("layers", shape.layers, settings.pipeline),
    ):  # fmt: skip
        if size % parts:
            key = "pipeline" if name == "layers" else "tensor"
            raise TextmillError(f"export.megatron.{key}: {parts} does not divide the model's {size} {name}")


def rank_tree(model: Model, config: ExportConfig, tensor: int, pipeline: int) -> dict[str, Any]:
    """What Megatron saves on one rank."""
    shape, settings = model.shape, config.megatron
    stage, modern = shape.layers // settings.pipeline, settings.version in ("2.0", "3.0")
    first, last = pipeline == 0, pipeline == settings.pipeline - 1
    outside = {ours: theirs for theirs, ours in OUTSIDE.items()}
    inside = {ours: theirs for theirs, ours in MODULES.items()}
    embedding: dict[str, Any] = {}
    blocks: dict[str, Any] = {}
    head: dict[str, Any] = {}
    output: dict[str, Any] = {}
    for name, values in model.weights.items():
        stem, _, ending = name.removeprefix("transformer.").rpartition(".")
        block = re.fullmatch(r"h\.(\d+)\.(.+)", stem)
        module = inside[block[2]] if block else outside[stem]
        part = to_tensor(_cut(values, module, ending, model, config, tensor), config.precision)
        if block:
            layer = int(block[1]) - pipeline * stage
            if 0 <= layer < stage:
                module = module.replace("attention.", "self_attention.", 1) if modern else module
                blocks[f"layers.{layer}.{module}.{ending}"] = part
        elif module.startswith("embedding."):
            if first:
                embedding[module.removeprefix("embedding.")] = {ending: part}
            if last and not first and stem == "wte" and not shape.untied:
                head = {ending: part}
        elif module == "output_layer":
            output = {ending: part}
        elif last:
            blocks[f"{module}.{ending}"] = part
    language = {"embedding": embedding} if first else {}
    language["encoder" if modern else "transformer"] = blocks
    language |= {"output_layer": output} if last and output else {}
    tree = {"language_model": language, **({"word_embeddings_for_head": head} if head else {})}
    version = {} if settings.version == "0" else {"checkpoint_version": float(settings.version)}
    return {"args": _args_of(shape, config), **version, "iteration": 0, "model": tree}


def _cut(values: Array, module: str, ending: str, model: Model, config: ExportConfig, tensor: int) -> Array:
    """A rank's part of a weight, as outputs x inputs."""
    shape, parts = model.shape, config.megatron.tensor
    matrix = ending == "weight" and module in (*ROWS, *COLUMNS)
    values = values.T if matrix else values
    if module == QKV:
        by_head = values.reshape(3, parts, -1, *values.shape[1:])[:, tensor]
        own = by_head.reshape(-1, *values.shape[1:])
        return to_version_order(own, shape.heads // parts, ORDERS[config.megatron.version])
    if module in VOCABULARY:
        return np.split(np.pad(values, [(0, _padded(shape, config) - len(values)), (0, 0)]), parts)[tensor]
    if module in ROWS:
        return np.split(values, parts)[tensor]
    return np.split(values, parts, axis=1)[tensor] if matrix else values


def _padded(shape: Any, config: ExportConfig) -> int:
    multiple = config.megatron.vocab_multiple * config.megatron.tensor
    return int(-(-shape.vocab // multiple) * multiple)


def _args_of(shape: Any, config: ExportConfig) -> Namespace:
    """The arguments that Megatron compares when it loads a checkpoint."""
    settings = config.megatron
    return Namespace(
        num_layers=shape.layers, hidden_size=shape.width, num_attention_heads=shape.heads, seq_length=shape.positions,
        max_position_embeddings=shape.positions, ffn_hidden_size=shape.inner, layernorm_epsilon=shape.epsilon,
        padded_vocab_size=_padded(shape, config), make_vocab_size_divisible_by=settings.vocab_multiple,
        tensor_model_parallel_size=settings.tensor, pipeline_model_parallel_size=settings.pipeline,
        position_embedding_type="learned_absolute", tokenizer_type="GPT2BPETokenizer",
        bias_gelu_fusion=shape.activation == "gelu_new", openai_gelu=False, add_position_embedding=True,
        hidden_dropout=shape.residual_dropout, attention_dropout=shape.attention_dropout, params_dtype=config.precision,
        untie_embeddings_and_output_weights=shape.untied, consumed_train_samples=0, consumed_valid_samples=0,
        iteration=0,
    )  # fmt: skip


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
    path: Path, folder: Path, states: States, sizes: tuple[int, int], args: dict[str, Any], version: Any, hints: Hints
) -> Model:
    """The model of all ranks' weights, by (tensor, pipeline)."""
    shape = _shape_of(path, args, states, sizes, hints)
    if shape.heads % sizes[0]:
        raise TextmillError(f"{folder}: {sizes[0]} tensor-parallel ranks do not divide {shape.heads} heads")
    order = order_of(version, str(folder))
    weights = collect_weights(shape, _joined(states, sizes, shape, order, folder), str(folder), padded=True)
    where = hints.tokenizer or (path if (path / "tokenizer.json").is_file() else None)
    return Model(shape, weights, open_tokenizer(where) if where else None)


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
    held = args if isinstance(args, dict) else getattr(args, "__dict__", {})
    return {name: value for name, value in held.items() if isinstance(value, int | float | str)}


def state_of(tree: dict[str, Any], path: Path) -> dict[str, Array]:
    """The weights of a rank by Megatron's names, without what different versions put around them."""
    if "model0" in tree:
        raise TextmillError(f"{path}: was saved with virtual pipeline stages, which are not read; save without them")
    found = {}
    for name, value in flatten(tree.get("model")).items():
        if isinstance(value, Tensor) and value.is_floating_point():
            short = re.sub(r"^(module\.|language_model\.|transformer\.|encoder\.)+", "", name)
            found[short.replace("self_attention.", "attention.")] = to_array(value)
    if not found:
        raise TextmillError(f"{path}: has no weights under 'model'; it is not a checkpoint of Megatron")
    return found


def _shape_of(path: Path, args: dict[str, Any], states: Any, sizes: tuple[int, int], hints: Hints) -> Any:
    config = hints.config or (path if (path / "config.json").is_file() else None)
    table = states[0, 0].get("embedding.word_embeddings.weight")
    positions = states[0, 0].get("embedding.position_embeddings.weight")
    if table is None or positions is None or table.ndim != 2 or positions.ndim != 2:
        raise TextmillError(f"{path}: its first rank has no word and position embeddings; it is not a GPT-2")
    rows = len(table) * sizes[0]
    if (stated := args.get("padded_vocab_size", rows)) != rows:
        raise TextmillError(
            f"{path}: its padded vocabulary is {rows:,} rows on {sizes[0]} ranks, its arguments say {stated}; a rank "
            "is missing, or files of different checkpoints are mixed"
        )
    if config is not None:
        shape = read_hf_shape(config)
    else:
        tied = "output_layer.weight" not in states[0, sizes[1] - 1]
        layers = [
            int(found[1]) for _, p in states for name in states[0, p] if (found := re.match(r"layers\.(\d+)", name))
        ]
        shape = open_family("gpt2").shape_of_hf(
            {**_hf_config(args, hints, rows, positions, max(layers, default=0)), "tie_word_embeddings": tied}, str(path)
        )
    vocab = hints.vocab or (shape.vocab if config is not None else rows)
    if vocab > rows:
        raise TextmillError(f"{path}: has {rows:,} rows of embeddings, fewer than the vocabulary of {vocab:,}")
    if config is None and hints.vocab is None:
        warn(f"{path}: keeps all {rows:,} rows of its padded vocabulary; give the real size with --vocab N")
    return shape


def _hf_config(args: dict[str, Any], hints: Hints, rows: int, positions: Array, last: int) -> dict[str, Any]:
    """A config.json from the arguments, or from the sizes of the weights where the file has no arguments."""
    heads = hints.heads or args.get("num_attention_heads")
    if heads is None:
        raise TextmillError("import: this checkpoint does not say how many attention heads there are; add --heads N")
    plain = "gelu_new" if args.get("bias_gelu_fusion", True) or args.get("openai_gelu") else "gelu"
    dropout = args.get("hidden_dropout", 0.1)
    return {
        "n_layer": args.get("num_layers", last + 1), "n_head": heads, "n_embd": positions.shape[1],
        "n_positions": len(positions), "n_inner": args.get("ffn_hidden_size"), "vocab_size": hints.vocab or rows,
        "activation_function": hints.activation or plain, "layer_norm_epsilon": args.get("layernorm_epsilon", 1e-5),
        "embd_pdrop": dropout, "resid_pdrop": dropout, "attn_pdrop": args.get("attention_dropout", 0.1),
    }  # fmt: skip


def _joined(states: States, sizes: tuple[int, int], shape: Any, order: Any, where: Path) -> Iterator[Named]:
    """Every weight under GPT-2's name, its parts joined and the layers of the pipeline stages counted through."""
    transposed = {weight.name: weight.transposed for weight in weights_of(shape)}
    before = 0
    for pipeline in range(sizes[1]):
        names = [name for name in states[0, pipeline] if not name.startswith("word_embeddings_for_head")]
        for name in names:
            parts: list[Any] = [states[tensor, pipeline].get(name) for tensor in range(sizes[0])]
            if any(part is None or part.shape != parts[0].shape for part in parts):
                raise TextmillError(f"{where}: '{name}' differs in size between ranks, or a rank lacks it")
            module, _, ending = re.sub(r"^layers\.\d+\.", "", name).rpartition(".")
            values = _join(parts, module, ending, shape.heads // sizes[0], order, str(where))
            full = _our_name(name, module, ending, before, where)
            yield full, np.ascontiguousarray(values.T) if transposed.get(full) and values.ndim == 2 else values
        before += len({name.split(".")[1] for name in names if name.startswith("layers.")})


def _our_name(name: str, module: str, ending: str, before: int, where: Path) -> str:
    layer = re.match(r"layers\.(\d+)\.", name)
    known = MODULES if layer else OUTSIDE
    if module not in known:
        raise TextmillError(f"{where}: has '{name}', which Megatron's GPT-2 does not have")
    return (
        f"transformer.h.{before + int(layer[1])}.{known[module]}.{ending}"
        if layer
        else f"{'' if module == 'output_layer' else 'transformer.'}{known[module]}.{ending}"
    )


def _join(parts: list[Any], module: str, ending: str, heads: int, order: Any, where: str) -> Array:
    if module == QKV:
        own = [from_version_order(part, heads, order, where).reshape(3, -1, *part.shape[1:]) for part in parts]
        joined = np.concatenate(own, axis=1)
        return joined.reshape(-1, *joined.shape[2:])
    if module in (*ROWS, *VOCABULARY):
        return np.concatenate(parts)
    return np.concatenate(parts, axis=1) if module in COLUMNS and ending == "weight" else parts[0]
