"""`engine.micro_batch: auto` in JAX: the largest micro-batch that a simple estimate of memory allows."""

from __future__ import annotations

from typing import Any

import jax

from textmill.config import RunConfig
from textmill.engines.distillation.sizes import teacher_bytes
from textmill.engines.mesh_jax import Shardings
from textmill.models import Shape

CPU_LOGITS = 1 << 30
"""On a CPU: most bytes of logits that a micro-batch would have."""
FRACTION = 0.6
"""The fraction of an accelerator's memory for weights, moments and the activations that backward needs."""
WEIGHT_BYTES = 24
ACTIVATION_BYTES = 48
"""Of a weight with its gradient and moments; and of bf16 activations, per channel of a token in a layer."""


def largest_micro_batch(
    config: RunConfig, shape: Shape, device: jax.Device, shardings: Shardings, precision: Any
) -> int:
    """The largest divisor of a device's samples that the estimate allows."""
    length = config.train.length or shape.positions
    device_batch = config.train.batch // shardings.data_devices
    fits = CPU_LOGITS // (4 * length * shape.padded_vocab)
    if device.platform != "cpu":
        memory = (device.memory_stats() or {}).get("bytes_limit", 16 << 30)
        weights = WEIGHT_BYTES * shape.parameters * shardings.data_devices / shardings.mesh.size
        weights += teacher_bytes(config.train, on_gpu=True)
        per_channel = ACTIVATION_BYTES * getattr(shape, "activation_factor", 1.0)
        layer = per_channel * shape.width + (8 * shape.heads * length if shape.attention_dropout else 0)
        fits = int((FRACTION * memory - weights) / (layer * shape.layers * length * precision.itemsize / 2))
    return max(size for size in range(1, device_batch + 1) if device_batch % size == 0 and size <= max(1, fits))
