"""Weight: everything textmill knows about one parameter, and the functions that depend on it alone.

GPT-2's `c_attn.weight` with width 4 and 2 heads: a checkpoint stores [4, 12], inputs x outputs, where the outputs are 4
for queries, then 4 for keys, then 4 for values (`transposed`, `parts=(4, 4, 4)`). In memory it is [12, 4], and its rows
are interleaved by head (`groups=2`), so that two tensor-parallel ranks have 6 rows each, all of one head (`split=0`):

    row of the net         0  1   2  3   4  5   6  7   8  9  10 11
    output of checkpoint   0  1   4  5   8  9   2  3   6  7  10 11
                           q     k      v      q     k      v
                           head 0              head 1

`part_rows` are the rows of queries, keys and values inside a group: 0 to 2, 2 to 4, 4 to 6.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.storage.prefetch import prefetch

Array = NDArray[np.float32]

SAMPLING_THREADS = 8
"""Most threads that sample initial weights."""


@dataclass(frozen=True)
class Weight:
    """One parameter: its names, its layout in checkpoint and memory, and how it is initialised, sharded and updated.

    Engines, tensor parallelism, Muon, LoRA, resizing, JAX, conversion and `verify` read these fields and never match
    names.
    """

    name: str
    """Its name in a checkpoint."""
    shape: tuple[int, ...]
    """Its size in a checkpoint, with the real vocabulary."""
    std: float = 0.0
    """Standard deviation of its initial values; 0: all are 0, or 1 with `ones`."""
    ones: bool = False
    """True if it starts as ones, as a norm's scale does."""
    parameter: str = ""
    """Its name in the net (`named_parameters`), used by `train.freeze` and `model.lora.targets`; default: `name`."""
    transposed: bool = False
    """True if checkpoints store the matrix as inputs x outputs; the net always has outputs x inputs, as nn.Linear."""
    parts: tuple[int, ...] = ()
    """Outputs of several matrices stored as one, in checkpoint order (queries, keys, values); empty: one matrix."""
    groups: int = 1
    """In memory, parts are interleaved in this many groups, each with its slice of every part: heads stay together."""
    padded_rows: int = 0
    """Rows in memory, where zero rows pad the checkpoint's rows (the vocabulary); 0: no padding."""
    by_token: bool = False
    """True if its rows are tokens of the vocabulary: the embedding, the head."""
    copies: tuple[str, ...] = ()
    """Names under which files may have it a second time, such as a tied head's; these are not read."""
    by_position: bool = False
    """True if its rows are positions."""
    decay: bool = False
    """True if weight decay applies."""
    muon: bool = False
    """True if `train.optimizer: muon` uses Muon for it instead of AdamW. For matrices only."""
    looked_up: bool = False
    """True if its rows are tokens and it is never multiplied: an embedding that is not also the head."""
    lora: bool = False
    """True if `model.lora` can add an adapter to it. For matrices of blocks only, the same number in each block."""
    head: bool = False
    """True if it belongs to a head that another task replaces: a file for finetuning may have others, or none."""
    depth: int = 0
    """Distance from the output: 0 after the blocks, 1 in the last block, `layers` in the first, then embeddings."""
    split: int | None = None
    """The dimension in memory that tensor-parallel ranks divide; None: each rank has all of it.

    0: column-parallel (outputs), or rows of the vocabulary; 1: row-parallel (inputs; outputs are summed over ranks)."""
    partial_gradient: bool = False
    """True if each tensor-parallel rank has all of the weight but computes a part of its gradient: ranks sum them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameter", self.parameter or self.name)

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """Its size in the net, on one process."""
        if self.padded_rows:
            return (self.padded_rows, *self.shape[1:])
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def outputs(self) -> int:
        """Rows of the matrix as the net has it."""
        return self.memory_shape[0]

    @property
    def inputs(self) -> int:
        """Columns of the matrix as the net has it."""
        return self.memory_shape[1]

    @property
    def size(self) -> int:
        """The number of its elements, without padding."""
        return math.prod(self.shape)

    @property
    def part_rows(self) -> list[slice]:
        """The rows of each part inside one group in memory; one slice with all rows if it is a single matrix."""
        ends = np.cumsum([rows // self.groups for rows in self.parts or (self.outputs,)]).tolist()
        return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def stem(self) -> str:
        """The name of the module that has it, in a checkpoint."""
        return self.name.removesuffix(".weight")


def to_memory(weight: Weight, values: Array) -> Array:
    """From checkpoint layout to memory layout: outputs x inputs, parts interleaved by group, vocabulary padded."""
    values = values.T if weight.transposed else values
    if weight.parts:
        values = values[_memory_order(weight)]
    if weight.padded_rows:
        values = np.pad(values, [(0, weight.padded_rows - len(values)), *[(0, 0)] * (values.ndim - 1)])
    return values


def to_checkpoint(weight: Weight, values: Any) -> Any:
    """The inverse of `to_memory`, exact, for a numpy array or a torch tensor; the result may be a view."""
    if weight.padded_rows:
        values = values[: weight.shape[0]]
    if weight.parts:
        values = values[np.argsort(_memory_order(weight))]
    return values.T if weight.transposed else values


def _memory_order(weight: Weight) -> NDArray[np.int64]:
    """The checkpoint's row for each row in memory."""
    starts = [0, *np.cumsum(weight.parts)[:-1].tolist()]
    rows = [
        start + np.arange(count).reshape(weight.groups, -1) for start, count in zip(starts, weight.parts, strict=True)
    ]
    return np.concatenate(rows, axis=1).reshape(-1)


def sample_weights(weights: Iterable[Weight], seed: int) -> Iterator[tuple[str, Array]]:
    """Initial values of weights, sampled in threads (numpy releases the GIL), with only a few in memory at a time."""
    threads = min(SAMPLING_THREADS, os.cpu_count() or 1)
    for weight, values in prefetch(lambda weight: _sample(weight, seed), weights, threads=threads, depth=threads):
        yield weight.name, values


def _sample(weight: Weight, seed: int) -> Array:
    """Initial values depend on the seed and the weight's own name only: the same on any engine and mesh."""
    if not weight.std:
        return np.full(weight.shape, float(weight.ones), np.float32)
    stream = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(weight.name.encode())]))
    return stream.standard_normal(weight.shape, np.float32) * np.float32(weight.std)


def count_parameters(weights: Iterable[Weight]) -> int:
    """The number of parameters, without padding."""
    return sum(weight.size for weight in weights)


def count_flops(
    weights: Iterable[Weight], layers: int, width: int, length: int, trained: Iterable[Weight] | None = None
) -> float:
    """FLOPs of the forward and backward pass for one token: 6N + 12LHQT if everything is trained.

    Otherwise forward is the same, a frozen weight has no gradient, and backward ends at the lowest block with a trained
    weight; adapters (trained weights that are not the net's own) are added.
    """
    weights = list(weights)
    trained = weights if trained is None else list(trained)
    trained_names = {weight.name for weight in trained}
    lowest = max(weight.depth for weight in trained)
    own_names = {weight.name for weight in weights}
    flops = 6.0 * sum(weight.size for weight in trained if weight.name not in own_names)
    for weight in weights:
        if weight.by_position or weight.looked_up:
            continue  # rows are looked up: nothing is multiplied
        input_has_gradient = weight.by_token or weight.depth <= lowest  # the head is above all blocks, a tied one too
        flops += weight.size * (2.0 + 2.0 * input_has_gradient + 2.0 * (weight.name in trained_names))
    return flops + (4.0 * layers + 8.0 * min(lowest, layers)) * width * length
