"""`engine.micro_batch: auto` in torch: the largest micro-batch that a simple estimate of memory allows."""

from __future__ import annotations

import math

import torch

from textmill.config import TrainConfig
from textmill.engines.meshes import Mesh
from textmill.models import Shape

CPU_LOGITS = 1 << 30
"""On a CPU, whose caches are small: as many samples as would have so many bytes of logits."""
GPU_FRACTION = 0.6
"""The fraction of a GPU's memory that weights, moments and the activations for backward may fill."""
WEIGHT_BYTES = 24
"""Of a weight: itself, its gradient, two moments, and temporary copies."""
ACTIVATION_BYTES = {True: 40, False: 72}
"""Kept for backward, for each channel of a token in a layer, in bf16: compiled (35 measured) and eager."""


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
    """The largest divisor of a rank's samples that the estimate allows; a compiled net has one size for an entire run.

    Where compiling was not requested, memory suffices to continue without it.
    """
    length = train.length or shape.positions
    batch = (math.gcd(*train.sizes) if compiled else train.batch) // mesh.data_ranks
    fits = CPU_LOGITS // (4 * length * shape.padded_vocab)
    if device.type == "cuda":
        memory = GPU_FRACTION * torch.cuda.get_device_properties(device).total_memory
        attention = 8 * shape.heads * length if shape.attention_dropout else 0
        layer = ACTIVATION_BYTES[compiled and requested] * shape.width + attention
        left = memory - WEIGHT_BYTES * shape.parameters
        fits = int(left / (layer * shape.layers * length * precision.itemsize / 2))
    return max(size for size in range(1, batch + 1) if batch % size == 0 and size <= max(1, fits))
