"""Parameters, tokens, steps, operations, disk and communication of a run, before it starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from textmill.checkpoints.folders import open_model
from textmill.config import RunConfig
from textmill.engines.memory.estimate import Estimate
from textmill.errors import TextmillError
from textmill.models import Shape, Weight, open_family
from textmill.models.lora import saved_weights, weights_with_adapters
from textmill.models.parameter_groups import rules_of
from textmill.storage.stages import MANIFEST
from textmill.tokens.batches.blend import BatchSizes
from textmill.tokens.batches.loader import open_batches
from textmill.tokens.batches.teacher_cache import record_of
from textmill.tokens.splits import Splits, open_splits
from textmill.tokens.store import dtype_for
from textmill.tokens.vocabulary.tokenizer import open_named, open_tokenizer
from textmill.training.auto_preset import fill_auto_preset
from textmill.training.run_length import RunLength, plan_run_length
from textmill.training.start import choose_shape, shape_of_checkpoint


@dataclass(frozen=True)
class Data:
    """What is known of the tokens: all of it once they are written, else only the size of the vocabulary."""

    vocab: int
    end: int
    splits: Splits | None
    tokens: int | None
    """Tokens of the train split."""


def open_data(config: RunConfig) -> Data:
    """The token store if there is one, else the tokenizer, else the vocabulary size of the config."""
    if config.tokens.use or (config.folder_of("tokens") / MANIFEST).is_file():
        splits = open_splits(config)
        tokens = config.plan.tokens or sum(store.tokens for store in splits.stores("train"))
        return Data(splits.tokenizer.vocab, splits.tokenizer.end, splits, tokens)
    if (config.folder_of("tokenizer") / MANIFEST).is_file():
        tokenizer = open_tokenizer(config.folder_of("tokenizer"))
        return Data(tokenizer.vocab, tokenizer.end, None, config.plan.tokens)
    if config.tokenizer.use:
        tokenizer = open_named(config.tokenizer.use, config.tokenizer.end_token, config.tokenizer.lowercase)
        return Data(tokenizer.vocab, tokenizer.end, None, config.plan.tokens)
    return Data(config.tokenizer.vocab, 0, None, config.plan.tokens)


def open_shape(config: RunConfig, data: Data) -> Shape:
    """The shape that the run will have."""
    init_model = open_model(config.model.init_from) if config.model.init_from else None
    if data.splits is not None:
        return choose_shape(config, data.splits, init_model)
    if init_model is not None:
        return shape_of_checkpoint(config, init_model)
    family = open_family(config.model.family)
    return family.shape_of(config.model, vocab=data.vocab, end=data.end, length=config.train.length)


def complete(config: RunConfig, data: Data) -> RunConfig:
    """The config with the values of `train.preset=auto`, which depend on the tokens."""
    if config.train.preset == "auto" and config.train.open_settings and data.splits is None:
        raise TextmillError(
            f"train.preset: auto computes {', '.join(config.train.open_settings)} from the tokens, and there are none "
            "yet; run textmill tokenize first, or set these keys"
        )
    return fill_auto_preset(config)


def run_length_of(config: RunConfig, shape: Shape, data: Data) -> RunLength | None:
    """The length of the run; None if it is in epochs of tokens that are not known."""
    length = config.train.length or shape.positions
    if data.splits is not None and config.plan.tokens is None:
        return plan_run_length(
            config.train, open_batches(config.train, data.splits, length=length, folder=None), length
        )
    if data.tokens is None and config.train.unit == "epochs":
        return None
    # Without tokens nobody knows how many steps an epoch has.
    train = config.train if data.tokens else config.train.model_copy(update={"max_epochs": None})
    samples = max(1, (data.tokens or 1) // length)
    sizes = BatchSizes(config.train.batch, config.train.batch_rampup)
    batches: Any = SimpleNamespace(sizes=sizes, layouts=[SimpleNamespace(samples_per_epoch=samples)])
    return plan_run_length(train, batches, length)


def parameters_by_part(config: RunConfig, shape: Shape) -> dict[str, int]:
    """Parameters of each part of the net, without padding."""
    known = {weight.name for weight in open_family(shape.family).weights_of(shape)}

    def part_of(weight: Weight) -> str:
        if weight.name not in known:
            return "LoRA adapters"
        if weight.by_token:
            return "token embedding and head"
        if weight.by_position:
            return "position embedding"
        if not 1 <= weight.depth <= shape.layers:
            return "outside the blocks"
        return "matrices of the blocks" if len(weight.shape) > 1 else "biases and norms of the blocks"

    parts: dict[str, int] = {}
    for weight in weights_with_adapters(shape, config.model.lora):
        parts[part_of(weight)] = parts.get(part_of(weight), 0) + weight.size
    return parts


def trained_weights(config: RunConfig, shape: Shape) -> list[Weight]:
    """The weights that the run changes."""
    rules = rules_of(shape, config.train, config.model.lora)
    return [weight for weight in weights_with_adapters(shape, config.model.lora) if rules[weight.name].trained]


def disk_of(config: RunConfig, shape: Shape, data: Data, steps: int | None) -> dict[str, int]:
    """Bytes of a checkpoint, of all checkpoints that are kept, and of the token store."""
    train = config.train
    trained = trained_weights(config, shape)
    saved = _count(saved_weights(shape, config.model.lora))
    muon = _count(weight for weight in trained if train.optimizer == "muon" and weight.muon)
    state = 2 * (_count(trained) - muon) + muon + (_count(trained) if train.average.memory else 0)
    checkpoint = 4 * (saved + state)
    keep = train.checkpoints.keep + 1  # the best one may be older
    if steps and train.checkpoints.keep_every:
        keep += steps // train.checkpoints.keep_every
    saves = steps // train.save_every + 1 if steps and isinstance(train.save_every, int) else keep
    kept = max(1, min(keep, saves))
    store = (data.tokens or 0) * dtype_for(data.vocab).itemsize
    return {"checkpoint": checkpoint, "checkpoints_kept": kept, "checkpoints": kept * checkpoint, "tokens": store}


def teacher_cache_bytes(config: RunConfig, shape: Shape, tokens: int, precision: str) -> int:
    """Bytes that `cache-teacher` writes for a run of so many tokens."""
    length = config.train.length or shape.positions
    record = record_of(length, config.train.distil.top_k, shape.vocab, exact=precision == "fp32")
    return -(-tokens // length) * record.itemsize


def _count(weights: Iterable[Weight]) -> int:
    return sum(weight.size for weight in weights)


def communication_of(config: RunConfig, shape: Shape, estimate: Estimate, length: int) -> dict[str, int]:
    """Bytes that each device sends in a step, by kind of parallelism.

    A ring all-gather or reduce-scatter of B bytes on n devices sends (n - 1) / n x B, an all-reduce twice as much.
    """
    mesh = estimate.mesh
    state = estimate.state
    passes = estimate.passes
    sent: dict[str, int] = {}
    zero = getattr(config.engine, "zero", None)
    all_gradients = state.gradients * (mesh.shard if mesh.shard > 1 else 1)
    if zero is not None:
        all_gradients = 4 * _count(trained_weights(config, shape))
    if mesh.replicate > 1:
        gathers = 2 if zero == 3 else 0  # ZeRO-3 gathers weights for forward and for backward
        ring = (mesh.replicate - 1) / mesh.replicate
        sent["data parallel: gradients"] = round(2 * ring * all_gradients / (mesh.shard if mesh.shard > 1 else 1))
        if gathers:
            sent["ZeRO-3: weights"] = round(gathers * passes * ring * estimate.itemsize * shape.parameters)
    if mesh.shard > 1:
        ring = (mesh.shard - 1) / mesh.shard
        gathers = 1 if mesh.keep_gathered else 2
        blocks = state.weights - state.outside_blocks
        sent["FSDP: weights"] = round(passes * ring * mesh.shard * (gathers * blocks + state.outside_blocks))
        sent["FSDP: gradients"] = round(passes * ring * all_gradients)
    if mesh.tensor > 1:
        ring = (mesh.tensor - 1) / mesh.tensor
        tokens = passes * estimate.micro_batch * length
        sums = 4 * shape.layers + (2 * shape.layers if config.engine.recompute else 0) + 2
        sent["tensor parallel: residual stream"] = round(2 * ring * sums * tokens * shape.width * estimate.itemsize)
        # The loss exchanges four numbers for each token; weights that are not divided get equal gradients.
        shared = _count(weight for weight in trained_weights(config, shape) if weight.split is None)
        sent["tensor parallel: loss and norms"] = round(2 * ring * 4 * (4 * tokens + shared / mesh.shard))
    return sent


def cache_bytes(shape: Shape, itemsize: int) -> int:
    """Bytes of the KV cache of one text of the longest context, without grouped-query attention; 0 without one."""
    if open_family(shape.family).OBJECTIVE != "next_token":
        return 0
    return 2 * shape.layers * shape.width * shape.positions * itemsize
