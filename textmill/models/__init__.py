"""Model families: what each offers, finding one by name, and the shape of the model in a folder."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import cast

import numpy as np
from numpy.typing import NDArray

from textmill.checkpoints.adapters import config_path
from textmill.config import SIZES
from textmill.errors import TextmillError
from textmill.models.family import Family, Shape
from textmill.models.weights import Weight, sample_weights, to_checkpoint, to_memory
from textmill.storage.files import read_json

__all__ = [
    "Family", "Shape", "Weight", "find_part", "initial_weights", "open_family", "shape_in", "to_checkpoint", "to_memory", "weights_of",
]  # fmt: skip


def open_family(name: str) -> Family:
    """The family that `model.family`, or a config.json's model_type, names: models/NAME/facts.py."""
    return cast(Family, import_module(f"textmill.models.{name}.facts"))


def find_part(shape: Shape, part: str) -> ModuleType | None:
    """A module of a shape's family: net_torch, net_jax or decode_torch; None: the family has none."""
    name = f"textmill.models.{shape.family}.{part}"
    return import_module(name) if find_spec(name) else None


def shape_in(folder: Path) -> Shape:
    """The shape of the model in a folder, read from its config.json."""
    path = config_path(folder)
    hf = read_json(path)
    kind = hf.get("model_type") if isinstance(hf, dict) else None
    if kind not in SIZES:
        raise TextmillError(f"{path}: model_type is {kind!r}; textmill knows {', '.join(SIZES)}")
    return open_family(kind).shape_of_hf(hf, str(path))


def weights_of(shape: Shape) -> list[Weight]:
    """Every weight of a net of this shape, adapters not among them."""
    return open_family(shape.family).weights_of(shape)


def initial_weights(shape: Shape, seed: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The weights of a net of this shape before the first step, by checkpoint name."""
    return sample_weights(weights_of(shape), seed)
