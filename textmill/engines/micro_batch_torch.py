"""`engine.micro_batch: auto` in torch: the largest micro-batch that the memory estimate allows."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from textmill.config import RunConfig, TrainConfig
from textmill.config.engines import DeepSpeedEngine
from textmill.engines.distillation.sizes import teacher_bytes
from textmill.engines.memory.parts import ACTIVATION_BYTES, ATTENTION_BYTES, State, sample_activations
from textmill.engines.memory.state_torch import count_state
from textmill.engines.meshes import Mesh, check_batch
from textmill.engines.parallel_torch import Parallel
from textmill.models import Shape
from textmill.models.base_torch import BaseNet

CPU_LOGITS = 1 << 30
"""On a CPU, whose caches are small: most bytes of logits that a micro-batch would have."""
GPU_FRACTION = 0.6
"""The fraction of a GPU's memory for weights, moments and the activations that backward needs."""
SPARE_BYTES = 8
SPARE_ACTIVATIONS = 1.25
"""More than the estimate, so that a run never ends for lack of memory: bytes for each weight, times the activations."""
DEEPSPEED_TOKENS = 1 << 14
"""Most tokens of a micro-batch in the DeepSpeed engine."""


def rank_samples(train: TrainConfig, mesh: Mesh, *, compiled: bool) -> int:
    """Samples of a rank in a step; a compiled net keeps its micro-batch for the entire run."""
    return (math.gcd(*train.sizes) if compiled else train.batch) // mesh.data_ranks


def largest_on_cpu(samples: int, shape: Shape, length: int) -> int:
    """The largest divisor of a rank's samples whose logits stay small."""
    return _largest_divisor(samples, CPU_LOGITS // (4 * length * shape.padded_vocab))


def largest_on_gpu(samples: int, state: State, sample_bytes: float, memory: int) -> int:
    """The largest divisor of a rank's samples whose activations fit next to the state; 1 if none does."""
    left = GPU_FRACTION * memory - state.total - SPARE_BYTES * state.elements
    return _largest_divisor(samples, int(left / (SPARE_ACTIVATIONS * sample_bytes)))


def largest_micro_batch(
    config: RunConfig,
    net: BaseNet,
    parallel: Parallel,
    device: torch.device,
    precision: torch.dtype,
    *,
    compiled: bool,
    compile_requested: bool,
) -> int:
    """The largest divisor of a rank's samples that the memory estimate allows.

    If compiling was not requested, the estimate leaves memory for the eager fallback.
    """
    train = config.train
    shape = net.shape
    mesh = parallel.mesh
    length = train.length or shape.positions
    samples = rank_samples(train, mesh, compiled=compiled)
    if device.type != "cuda":
        return largest_on_cpu(samples, shape, length)
    stays_compiled = compiled and compile_requested
    sample = sample_activations(
        shape,
        length,
        ACTIVATION_BYTES[stays_compiled],
        ATTENTION_BYTES[stays_compiled],
        precision.itemsize,
        mesh,
        config.engine.recompute,
    )
    state = count_state(net, train, parallel)
    state = replace(state, buffers=state.buffers + teacher_bytes(train, on_gpu=True))
    return largest_on_gpu(samples, state, sample, torch.cuda.get_device_properties(device).total_memory)


def _largest_divisor(samples: int, fits: int) -> int:
    return max(size for size in range(1, samples + 1) if samples % size == 0 and size <= max(1, fits))


def micro_batch_of(section: DeepSpeedEngine, train: TrainConfig, shape: Shape, ranks: int) -> int:
    """The configured micro-batch, or the largest divisor of a rank's samples with at most DEEPSPEED_TOKENS tokens."""
    check_batch(train, ranks, section.micro_batch)
    if section.micro_batch != "auto":
        return section.micro_batch
    rank_batch = train.batch // ranks
    most = max(1, DEEPSPEED_TOKENS // (train.length or shape.positions))
    return max(size for size in range(1, rank_batch + 1) if rank_batch % size == 0 and size <= most)
