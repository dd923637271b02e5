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
from textmill.checkpoints.folders import Checkpoint, StepChoice, find_model
from textmill.config import SIZES, RunConfig
from textmill.config.model import is_family_file
from textmill.errors import TextmillError
from textmill.models.family import Family, Shape
from textmill.models.family_files import find_family_file, load_family_file
from textmill.models.weights import Weight, sample_weights, to_checkpoint, to_memory
from textmill.storage.files import read_json

__all__ = [
    "Family", "Shape", "Weight", "find_part", "find_run_model", "initial_weights", "open_family", "shape_in", "to_checkpoint",
    "to_memory", "weights_of",
]  # fmt: skip


def open_family(name: str) -> Family:
    """The family that `model.family` or a config.json's model_type names: models/NAME/facts.py, or the user's own file.

    A path is code to run: callers pass one only if the user named it.
    """
    if is_family_file(name):
        return cast(Family, load_family_file(name).module)
    if (file := find_family_file(name)) is not None:
        return cast(Family, file.module)
    return cast(Family, import_module(f"textmill.models.{name}.facts"))


def find_part(shape: Shape, part: str) -> ModuleType | None:
    """A module of a shape's family: net_torch, net_jax or decode_torch; None: the family has none. A file has the torch net."""
    if (file := find_family_file(shape.family)) is not None:
        return file.module if part == "net_torch" else None
    name = f"textmill.models.{shape.family}.{part}"
    return import_module(name) if find_spec(name) else None


def shape_in(folder: Path) -> Shape:
    """The shape of the model in a folder, read from its config.json."""
    path = config_path(folder)
    hf = read_json(path)
    kind = hf.get("model_type") if isinstance(hf, dict) else None
    if not isinstance(kind, str) or (kind not in SIZES and find_family_file(kind) is None):
        raise TextmillError(
            f"{path}: model_type is {kind!r}; textmill knows {', '.join(SIZES)}; "
            f"if it is a family of your own, name its file: model.family=./{kind}.py"
        )
    return open_family(kind).shape_of_hf(hf, str(path))


def find_run_model(config: RunConfig, step: StepChoice = "latest") -> Checkpoint:
    """The model that a config stands for: the run's checkpoint, or `model.init_from`; its family is loaded."""
    open_family(config.model.family)
    return find_model(config.folder_of("train"), config.model.init_from, step)


def weights_of(shape: Shape) -> list[Weight]:
    """Every weight of a net of this shape, adapters not among them."""
    return open_family(shape.family).weights_of(shape)


def initial_weights(shape: Shape, seed: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """The weights of a net of this shape before the first step, by checkpoint name."""
    return sample_weights(weights_of(shape), seed)
