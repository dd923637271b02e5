"""`engine.micro_batch: auto` in torch: the largest micro-batch that a simple estimate of memory allows."""

from __future__ import annotations

import math

import torch

from textmill.config import TrainConfig
from textmill.config.engines import DeepSpeedEngine
from textmill.engines.meshes import Mesh, check_batch
from textmill.models import Shape

CPU_LOGITS = 1 << 30
"""On a CPU, whose caches are small: most bytes of logits that a micro-batch would have."""
GPU_FRACTION = 0.6
"""The fraction of a GPU's memory for weights, moments and the activations that backward needs."""
WEIGHT_BYTES = 24
"""Of a weight: itself, its gradient, two moments, and temporary copies."""
AVERAGE_BYTES = 4
"""Of a weight, more with `train.average`."""
ACTIVATION_BYTES = {True: 40, False: 72}
"""Of bf16 activations, per channel of a token in a layer: compiled (35 measured) and eager."""
DEEPSPEED_TOKENS = 1 << 14
"""Most tokens of a micro-batch in the DeepSpeed engine."""


def largest_micro_batch(
    train: TrainConfig,
    shape: Shape,
    mesh: Mesh,
    device: torch.device,
    precision: torch.dtype,
    *,
    compiled: bool,
    requested: bool,
) -> int:
    """The largest divisor of a rank's samples that the estimate allows; a compiled net keeps it for the entire run.

    If compiling was not requested, the estimate leaves memory for the eager fallback.
    """
    length = train.length or shape.positions
    batch = (math.gcd(*train.sizes) if compiled else train.batch) // mesh.data_ranks
    fits = CPU_LOGITS // (4 * length * shape.padded_vocab)
    if device.type == "cuda":
        memory = GPU_FRACTION * torch.cuda.get_device_properties(device).total_memory
        attention = 8 * shape.heads * length if shape.attention_dropout else 0
        layer = ACTIVATION_BYTES[compiled and requested] * shape.width + attention
        left = memory - (WEIGHT_BYTES + (AVERAGE_BYTES if train.average.memory else 0)) * shape.parameters
        fits = int(left / (layer * shape.layers * length * precision.itemsize / 2))
    return max(size for size in range(1, batch + 1) if batch % size == 0 and size <= max(1, fits))


def micro_batch_of(section: DeepSpeedEngine, train: TrainConfig, shape: Shape, ranks: int) -> int:
    """The configured micro-batch, or the largest divisor of a rank's samples with at most DEEPSPEED_TOKENS tokens."""
    check_batch(train, ranks, section.micro_batch)
    if section.micro_batch != "auto":
        return section.micro_batch
    rank_batch = train.batch // ranks
    most = max(1, DEEPSPEED_TOKENS // (train.length or shape.positions))
    return max(size for size in range(1, rank_batch + 1) if rank_batch % size == 0 and size <= most)
