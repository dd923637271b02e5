"""Memory by part, the arithmetic of activations that all engines share, and the largest micro-batch that fits.

The GPT-2 of 124M parameters in fp32 with AdamW on one GPU: weights 0.5 GB, gradients 0.5 GB, optimizer state 1 GB
(two moments). A compiled net in bf16 keeps 32 bytes of activations per channel of a token in a layer: for a sample of
1,024 tokens 32 x 768 x 12 x 1,024 = 0.3 GB, times the samples of a micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from textmill.config import TrainConfig
from textmill.config.engines import DeepSpeedEngine
from textmill.engines.meshes import Mesh, check_batch
from textmill.models import Shape

ACTIVATION_BYTES = {True: 32.0, False: 38.0}
"""On a GPU, of bf16 activations, per channel of a token in a layer: compiled and eager (bench/LOG.md compares both with
measured peaks)."""
ATTENTION_BYTES = {True: 4.0, False: 8.0}
"""The same for each attention weight, if these have dropout; the second is an upper bound."""
JAX_ACTIVATION_BYTES = 48.0
"""The same with JAX; not measured."""
DIVIDED = 24 / 34
"""The fraction of activations that tensor-parallel ranks divide; with sequence parallelism they divide the rest too
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models")."""
CPU_LOGITS_BYTES = 1 << 30
"""On a CPU, whose caches are small: most bytes of logits that a micro-batch would have."""
GPU_FRACTION = 0.6
"""The fraction of a GPU's memory for weights, moments and the activations that backward needs."""
SPARE_BYTES = 8
SPARE_ACTIVATIONS = 1.25
"""More than the estimate, so that a run never ends for lack of memory: bytes for each weight, times the activations."""
DEEPSPEED_TOKENS = 1 << 14
"""Most tokens of a micro-batch in the DeepSpeed engine."""


@dataclass(frozen=True)
class State:
    """Bytes of a rank that do not depend on the micro-batch."""

    weights: int
    gradients: int
    optimizer: int
    """Optimizer state, and the average of `train.ema_window`."""
    buffers: int
    """Gathered weights and flat gradients for collectives."""
    host: int = 0
    """Bytes in the machine's memory instead of the device's: what DeepSpeed offloads."""
    elements: int = 0
    """Weights of this rank."""
    outside_blocks: int = 0
    """Bytes of those weights that belong to no block: FSDP keeps them gathered from forward to backward."""

    @property
    def total(self) -> int:
        """All of it on the device."""
        return self.weights + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True)
class Memory:
    """Bytes of one device by part, at the peak of a training step."""

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(asdict(self).values())


def sample_activations(
    shape: Shape,
    length: int,
    per_channel: float,
    per_weight: float,
    itemsize: int,
    mesh: Mesh,
    activation_checkpointing: int,
) -> float:
    """Bytes of activations that backward needs of one sample; those for a channel and an attention weight are in bf16.

    With activation checkpointing, a group of blocks keeps its input, and one group at a time has all its activations.
    """
    per_channel *= getattr(shape, "activation_factor", 1.0)  # of GPT-2's; the constants are measured with that
    token_bytes = per_channel * shape.width  # of a layer, in bf16
    if shape.attention_dropout:
        token_bytes += per_weight * shape.heads * length
    sequence_ranks = mesh.tensor if mesh.sequence else 1
    rank_fraction = DIVIDED / mesh.tensor + (1 - DIVIDED) / sequence_ranks
    block = token_bytes * length * itemsize / 2 * rank_fraction
    if not activation_checkpointing:
        return block * shape.layers
    group_input = shape.width * length * itemsize / sequence_ranks
    groups = -(-shape.layers // activation_checkpointing)
    return groups * group_input + min(activation_checkpointing, shape.layers) * block


def passes_kept(mesh: Mesh, passes: int) -> float:
    """The activations that the first stage of a pipeline keeps, as a multiple of those of a micro-batch in all blocks:
    1 with 1F1B, since a stage of s has 1 / s of the blocks and keeps s micro-batches."""
    if mesh.pipeline == 1:
        return 1.0
    kept = {"gpipe": passes, "1f1b": mesh.pipeline, "interleaved": (3 * mesh.pipeline - 1) / 2}[mesh.schedule]
    return min(kept, passes) / mesh.pipeline


MICRO_BATCHES_PER_STAGE = 4
"""With this many micro-batches for each stage of a pipeline, a stage waits at most a fifth of the time."""


def rank_samples(train: TrainConfig, mesh: Mesh, *, compiled: bool) -> int:
    """The samples that a micro-batch of a rank may have: all of a step, or with a pipeline a part of them.

    A compiled net keeps its micro-batch for the entire run."""
    samples = (math.gcd(*train.sizes) if compiled or mesh.pipeline > 1 else train.batch) // mesh.data_ranks
    if mesh.pipeline == 1:
        return samples
    # Interleaved, the micro-batches are a multiple of the stages.
    divided = samples // mesh.pipeline if mesh.chunks > 1 else samples
    return math.gcd(divided, max(1, samples // (MICRO_BATCHES_PER_STAGE * mesh.pipeline)))


def largest_on_cpu(samples: int, shape: Shape, length: int) -> int:
    """The largest divisor of a rank's samples whose logits stay small."""
    return largest_divisor(samples, CPU_LOGITS_BYTES // (4 * length * shape.padded_vocab))


def largest_on_gpu(samples: int, state: State, sample_bytes: float, memory: int) -> int:
    """The largest divisor of a rank's samples whose activations fit next to the state; 1 if none does."""
    left = GPU_FRACTION * memory - state.total - SPARE_BYTES * state.elements
    return largest_divisor(samples, int(left / (SPARE_ACTIVATIONS * sample_bytes)))


def largest_divisor(samples: int, fits: int) -> int:
    """The largest divisor of `samples` that is at most `fits`; 1 if none is."""
    return max(size for size in range(1, samples + 1) if samples % size == 0 and size <= max(1, fits))


def deepspeed_micro_batch(section: DeepSpeedEngine, train: TrainConfig, shape: Shape, ranks: int) -> int:
    """The configured micro-batch, or the largest divisor of a rank's samples with at most DEEPSPEED_TOKENS tokens."""
    check_batch(train, ranks, section.micro_batch)
    if section.micro_batch != "auto":
        return section.micro_batch
    return largest_divisor(train.batch // ranks, DEEPSPEED_TOKENS // (train.length or shape.positions))
