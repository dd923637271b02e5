"""Writes Megatron checkpoints with random weights, and computes their logits as Megatron's ranks would.

Every tensor-parallel rank has its own heads and its own part of the MLP and of the vocabulary; results are summed."""

from __future__ import annotations

import math
import zlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

TRACKER = "latest_checkpointed_iteration.txt"


def draw(name: str, *size: int) -> Tensor:
    """Random numbers that the name decides, so that two ranks can have the same."""
    dice = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(size, generator=dice) * 0.3


def write(
    folder: Path,
    version: str = "3.0",
    tensor: int = 1,
    pipeline: int = 1,
    *,
    layers: int = 4,
    rows: int = 320,
    untied: bool = False,
) -> Path:
    """A checkpoint as Megatron's ranks save it: 4 heads, width 16, 20 positions, `rows` of a padded vocabulary."""
    (folder / "release").mkdir(parents=True)
    (folder / TRACKER).write_text("release")
    for t in range(tensor):
        for p in range(pipeline):
            rank = folder / "release" / (f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipeline > 1 else ""))
            rank.mkdir()
            tree = {"args": args(tensor, pipeline, layers, rows, untied), "iteration": 0}
            tree |= {} if version == "0" else {"checkpoint_version": float(version)}
            model = rank_model(float(version), (t, tensor), (p, pipeline), layers, rows, untied)
            torch.save({**tree, "model": model}, rank / "model_optim_rng.pt")
    return folder


def args(tensor: int, pipeline: int, layers: int, rows: int, untied: bool) -> Namespace:
    return Namespace(
        num_layers=layers,
        hidden_size=16,
        num_attention_heads=4,
        max_position_embeddings=20,
        ffn_hidden_size=64,
        layernorm_epsilon=1e-5,
        padded_vocab_size=rows,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        bias_gelu_fusion=True,
        untie_embeddings_and_output_weights=untied,
    )


def rank_model(
    version: float, tensor: tuple[int, int], pipeline: tuple[int, int], layers: int, rows: int, untied: bool
) -> dict[str, Any]:
    (t, ranks), (p, stages) = tensor, pipeline
    part, attention = ("encoder", "self_attention") if version >= 2 else ("transformer", "attention")
    words = {"weight": draw(f"words {t}", rows // ranks, 16)}
    blocks: dict[str, Tensor] = {}
    for layer in range(layers // stages):
        number = p * layers // stages + layer
        own: dict[str, tuple[int, ...]] = {  # cut among the ranks
            f"{attention}.query_key_value.weight": (48 // ranks, 16),
            f"{attention}.query_key_value.bias": (48 // ranks,),
            f"{attention}.dense.weight": (16, 16 // ranks),
            "mlp.dense_h_to_4h.weight": (64 // ranks, 16),
            "mlp.dense_h_to_4h.bias": (64 // ranks,),
            "mlp.dense_4h_to_h.weight": (16, 64 // ranks),
        }
        for name, size in own.items():
            blocks[f"layers.{layer}.{name}"] = draw(f"{number} {name} {t}", *size)
        norms = [
            f"{norm}.{end}" for norm in ("input_layernorm", "post_attention_layernorm") for end in ("weight", "bias")
        ]
        for name in (*norms, f"{attention}.dense.bias", "mlp.dense_4h_to_h.bias"):
            blocks[f"layers.{layer}.{name}"] = draw(f"{number} {name}", 16)
    model: dict[str, Any] = {part: blocks}
    tree: dict[str, Any] = {"language_model": model}
    if p == 0:
        positions = {"weight": draw("positions", 20, 16)}
        model["embedding"] = {"word_embeddings": words, "position_embeddings": positions}
    if p == stages - 1:
        blocks |= {f"final_layernorm.{end}": draw(f"final {end}", 16) for end in ("weight", "bias")}
        if untied:
            model["output_layer"] = {"weight": draw(f"output {t}", rows // ranks, 16)}
        elif stages > 1:
            tree["word_embeddings_for_head"] = words
    return tree


def load(folder: Path, tensor: int, pipeline: int) -> list[list[dict[str, Any]]]:
    """The files by pipeline stage and tensor rank."""
    name = (folder / TRACKER).read_text().strip()

    def path(t: int, p: int) -> Path:
        rank = f"mp_rank_{t:02d}" if pipeline == 1 else f"mp_rank_{t:02d}_{p:03d}"
        return folder / name / rank / "model_optim_rng.pt"

    return [[torch.load(path(t, p), weights_only=False) for t in range(tensor)] for p in range(pipeline)]


def heads_of(mixed: Tensor, heads: int, version: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [samples, length, heads, head width] of a rank's query_key_value output."""
    start, width = mixed.shape[:-1], mixed.shape[-1] // (3 * heads)
    if version >= 2:
        split = mixed.view(*start, heads, 3, width)
        return split[..., 0, :], split[..., 1, :], split[..., 2, :]
    if version == 1:
        split = mixed.view(*start, heads, width, 3)
        return split[..., 0], split[..., 1], split[..., 2]
    split = mixed.view(*start, 3, heads, width)
    return split[..., 0, :, :], split[..., 1, :, :], split[..., 2, :, :]


def logits(folder: Path, tensor: int, pipeline: int, ids: Tensor) -> Tensor:
    stages = load(folder, tensor, pipeline)
    args, version = stages[0][0]["args"], stages[0][0].get("checkpoint_version", 0)
    heads, layers = args.num_attention_heads // tensor, args.num_layers // pipeline
    models = [[rank["model"]["language_model"] for rank in stage] for stage in stages]
    tables = [model["embedding"]["word_embeddings"]["weight"] for model in models[0]]
    assert sum(map(len, tables)) == args.padded_vocab_size
    x = sum(
        (
            torch.where(
                ((ids >= at * len(table)) & (ids < (at + 1) * len(table)))[..., None],
                table[(ids - at * len(table)).clamp(0, len(table) - 1)],
                0.0,
            )
            for at, table in enumerate(tables)
        ),
        torch.zeros(()),
    )
    x = x + models[0][0]["embedding"]["position_embeddings"]["weight"][: ids.shape[1]]
    part, attention = ("encoder", "self_attention") if version >= 2 else ("transformer", "attention")
    for stage in models:
        for layer in range(layers):
            ranks = [
                {
                    name.removeprefix(f"layers.{layer}."): value
                    for name, value in one[part].items()
                    if name.startswith(f"layers.{layer}.")
                }
                for one in stage
            ]
            x = block(x, ranks, attention, heads, version, args.layernorm_epsilon)
    last = models[-1][0][part]
    x = layer_norm(
        x, x.shape[-1:], last["final_layernorm.weight"], last["final_layernorm.bias"], args.layernorm_epsilon
    )
    if args.untie_embeddings_and_output_weights:
        tables = [rank["output_layer"]["weight"] for rank in models[-1]]
    elif pipeline > 1:
        tables = [rank["model"]["word_embeddings_for_head"]["weight"] for rank in stages[-1]]
    return torch.cat([linear(x, table) for table in tables], -1)


def block(
    x: Tensor, ranks: list[dict[str, Tensor]], attention: str, heads: int, version: float, epsilon: float
) -> Tensor:
    def norm(name: str) -> Tensor:
        return layer_norm(x, x.shape[-1:], ranks[0][f"{name}.weight"], ranks[0][f"{name}.bias"], epsilon)

    def parallel(name: str, value: Tensor, rank: dict[str, Tensor]) -> Tensor:
        return linear(value, rank[f"{name}.weight"], rank[f"{name}.bias"])

    length, normed, total = x.shape[1], norm("input_layernorm"), torch.zeros(())
    for rank in ranks:
        q, k, v = (
            one.transpose(1, 2)
            for one in heads_of(parallel(f"{attention}.query_key_value", normed, rank), heads, version)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        total = total + linear(mixed, rank[f"{attention}.dense.weight"])
    x = x + total + ranks[0][f"{attention}.dense.bias"]
    normed, total = norm("post_attention_layernorm"), torch.zeros(())
    for rank in ranks:
        inner = gelu(parallel("mlp.dense_h_to_4h", normed, rank), approximate="tanh")
        total = total + linear(inner, rank["mlp.dense_4h_to_h.weight"])
    return x + total + ranks[0]["mlp.dense_4h_to_h.bias"]
