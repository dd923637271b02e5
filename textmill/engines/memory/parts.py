"""Memory by part, and the arithmetic of activations that all engines share.

The GPT-2 of 124M parameters in fp32 with AdamW on one GPU: weights 0.5 GB, gradients 0.5 GB, optimizer state 1 GB
(two moments). A compiled net in bf16 keeps 32 bytes of activations per channel of a token in a layer: for a sample of
1,024 tokens 32 x 768 x 12 x 1,024 = 0.3 GB, times the samples of a micro-batch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from textmill.engines.meshes import Mesh
from textmill.models import Shape

ACTIVATION_BYTES = {True: 32.0, False: 38.0}
"""On a GPU, of bf16 activations, per channel of a token in a layer: compiled and eager (docs/plan.md compares both with
measured peaks)."""
ATTENTION_BYTES = {True: 4.0, False: 8.0}
"""The same for each attention weight, if these have dropout; the second is an upper bound."""
JAX_ACTIVATION_BYTES = 48.0
"""The same with JAX; not measured."""
DIVIDED = 24 / 34
"""The fraction of activations that tensor-parallel ranks divide; with sequence parallelism they divide the rest too
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models")."""


@dataclass(frozen=True)
class State:
    """Bytes of a rank that do not depend on the micro-batch."""

    weights: int
    gradients: int
    optimizer: int
    """Optimizer state, and the average of `train.average`."""
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
    shape: Shape, length: int, per_channel: float, per_weight: float, itemsize: int, mesh: Mesh, recompute: int
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
    if not recompute:
        return block * shape.layers
    group_input = shape.width * length * itemsize / sequence_ranks
    groups = -(-shape.layers // recompute)
    return groups * group_input + min(recompute, shape.layers) * block
