"""Model families: the facts of each in numpy, its net beside it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from textmill.checkpoints.adapters import config_path
from textmill.config import SIZES
from textmill.errors import TextmillError
from textmill.storage.files import read_json
from textmill.storage.prefetch import prefetch

DRAWING = 8
"""Threads that draw first weights at most."""


@dataclass(frozen=True)
class Weight:
    """One weight as a checkpoint holds it, and what becomes of it."""

    name: str
    shape: tuple[int, ...]
    """In checkpoint layout, with the real vocabulary."""
    start: float
    """Standard deviation at the start; 0 with `ones` for LayerNorm scales."""
    layout: Literal["plain", "linear", "qkv", "qkv_bias", "vocab"] = "plain"
    """How memory differs from the checkpoint: transposed, transposed and by head, by head alone (a bias, or rows of outputs), padded."""
    decay: bool = False
    ones: bool = False
    by_position: bool = False
    """Whether its rows are positions."""
    depth: int = 0
    """How far below the head: 0 after the blocks, 1 in the last of them, one more than there are blocks in the embeddings."""
    split: int | None = None
    """The dimension, in memory, that tensor-parallel peers share; none: each has the whole of it."""
    partial: bool = False
    """Whether peers who all hold it each see a part of its gradient, even where they see the same tokens."""


class Family(Protocol):
    """What a family's module offers."""

    OBJECTIVE: str

    def shape_of(self, config: Any, *, vocab: int, end: int, length: int | None = None) -> Any: ...
    def shape_of_hf(self, hf: dict[str, Any], where: str) -> Any: ...
    def hf_config_of(self, shape: Any) -> dict[str, Any]: ...
    def weights_of(self, shape: Any) -> list[Weight]: ...
    def first_weights(self, shape: Any, seed: int) -> Iterator[tuple[str, NDArray[np.float32]]]: ...
    def memory_name(self, name: str) -> str: ...
    def to_memory(self, weight: Weight, values: NDArray[np.float32], shape: Any) -> NDArray[np.float32]: ...
    def to_checkpoint(self, weight: Weight, values: Any, shape: Any) -> Any: ...
    def known_weights(
        self, named: Iterable[tuple[str, NDArray[np.float32]]]
    ) -> Iterator[tuple[str, NDArray[np.float32]]]: ...


def shape_in(folder: Path) -> Any:
    """The shape of the model in a folder, by its config.json."""
    path = config_path(folder)
    hf = read_json(path)
    kind = hf.get("model_type") if isinstance(hf, dict) else None
    if kind not in SIZES:
        raise TextmillError(f"{path}: model_type is {kind!r}; textmill knows {', '.join(SIZES)}")
    return open_family(kind).shape_of_hf(hf, str(path))


def first_of(weights: Iterable[Weight], seed: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Weights before the first step, drawn by threads, since drawing leaves the interpreter's lock; no more than a few wait in memory."""
    threads = min(DRAWING, os.cpu_count() or 1)
    for weight, values in prefetch(lambda weight: _first_values(weight, seed), weights, threads=threads, depth=threads):
        yield weight.name, values


def _first_values(weight: Weight, seed: int) -> NDArray[np.float32]:
    """One of them; it depends on the seed and its own name only, on any engine and mesh."""
    if not weight.start:
        return np.full(weight.shape, float(weight.ones), np.float32)
    stream = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(weight.name.encode())]))
    return stream.standard_normal(weight.shape, np.float32) * np.float32(weight.start)


def open_family(name: str) -> Family:
    """The family that `model.family`, or a config.json's model_type, names: models/NAME/facts.py."""
    family: Any = import_module(f"textmill.models.{name}.facts")
    return family  # type: ignore[no-any-return]
