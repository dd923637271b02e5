"""What the teachers of a run take of each device."""

from __future__ import annotations

from textmill.config import TrainConfig
from textmill.engines.distillation.folders import teacher_folder
from textmill.models import read_shape

CHUNK_LOGITS = 1 << 26
"""Logits of a chunk of the loss on a GPU; several matrices of this size exist in fp32."""
COMPILED_CHUNKS = 4
"""How much larger chunks are if the loss is compiled: most of these matrices then do not exist."""
MATRICES = 8
PER_TEACHER = 3
"""Matrices of that size that may exist at once, and more for each teacher: an upper bound from the formulas."""


def teacher_bytes(train: TrainConfig, *, on_gpu: bool) -> int:
    """Bytes of the teachers' weights, and of the chunk of the loss on a GPU; 0 without teachers."""
    names = [] if train.distil.cache else train.distil.teachers
    weights = sum(4 * read_shape(teacher_folder(name)).parameters for name in names)
    uses_chunks = on_gpu and bool(train.distil.teachers)
    return weights + (4 * CHUNK_LOGITS * (MATRICES + PER_TEACHER * len(names)) if uses_chunks else 0)


def chunk_tokens(vocab: int, *, compiled: bool) -> int:
    """Tokens of a chunk of the loss on a GPU: a power of two, which divides most micro-batches evenly."""
    most = max(1, CHUNK_LOGITS * (COMPILED_CHUNKS if compiled else 1) // vocab)
    return 1 << (most.bit_length() - 1)
