"""Bytes of weights, gradients and optimizer state on one rank of DeepSpeed's ZeRO, by its stage."""

from __future__ import annotations

import math

from textmill.config import LoraConfig, TrainConfig
from textmill.config.deepspeed_json import read_user_config
from textmill.config.engines import DeepSpeedEngine
from textmill.engines.deepspeed_config import fill_unset
from textmill.engines.memory.parts import State
from textmill.models import Shape
from textmill.models.lora import weights_with_adapters
from textmill.models.parameter_groups import rules_of

MASTER_BYTES = 4
MOMENT_BYTES = 8
"""Of a trained weight: the fp32 master copy, and AdamW's two moments."""


def state_on_ranks(
    engine: DeepSpeedEngine, train: TrainConfig, shape: Shape, lora: LoraConfig | None, world: int, itemsize: int
) -> State:
    """The state of one of `world` ranks: stage 1 shards optimizer state, 2 gradients too, 3 weights too."""
    section = fill_unset(engine, read_user_config(engine.deepspeed_config))
    stage = section.zero if isinstance(section.zero, int) else 2
    rules = rules_of(shape, train, lora)
    members = [(weight, math.prod(weight.memory_shape)) for weight in weights_with_adapters(shape, lora)]
    every = sum(count for _, count in members)
    trained = sum(count for weight, count in members if rules[weight.name].trained)
    block = max(1, (every - shape.padded_vocab * shape.width) // shape.layers)
    if not stage:
        return State(4 * every, 4 * trained, MOMENT_BYTES * trained, 4 * trained if world > 1 else 0)
    weights = itemsize * every if stage < 3 else -(-itemsize * every // world)
    gradients = itemsize * trained if stage < 2 else -(-4 * trained // world)
    optimizer = -(-(MASTER_BYTES + MOMENT_BYTES) * trained // world)
    host = 0
    if section.offload_optimizer:
        optimizer, host = 0, optimizer + (gradients if stage > 1 else 0)
    if section.offload_weights:
        weights, host = 0, host + weights
    # Buckets have the size of a block; stage 3 keeps the weights of two blocks and the embedding gathered.
    buffers = 2 * itemsize * block + (itemsize * (2 * block + shape.padded_vocab * shape.width) if stage == 3 else 0)
    return State(weights, gradients, optimizer, buffers, host)
