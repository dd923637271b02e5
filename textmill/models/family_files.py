"""Model families in files of the user's own (`model.family`), found by the family's name once the file was run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from textmill.config import SIZES, ModelConfig
from textmill.config.own_files import OwnFile, open_own_file
from textmill.errors import TextmillError
from textmill.models.family import Shape

NEEDED = ("NAME", "Net", "shape_of", "shape_of_hf", "hf_config_of", "small_shape")
"""What a family's file must define."""


_loaded: dict[str, OwnFile] = {}
"""The loaded files by the names of their families."""


def load_family_file(name: str) -> OwnFile:
    """Run the file, once for each content, and register its family under its own NAME."""
    found = open_own_file(name, "model.family")
    if find_family_file(getattr(found.module, "NAME", "")) is not found:
        _check(found.module, found.path)
        _loaded[found.module.NAME] = found
    return found


def _check(module: ModuleType, path: Path) -> None:
    """Check that the file defines a family; add defaults for optional names."""
    missing = [name for name in NEEDED if not hasattr(module, name)]
    if missing:
        raise TextmillError(f"model.family: {path} does not define {', '.join(missing)}; see docs/own-model.md")
    if module.NAME in SIZES:
        raise TextmillError(
            f"model.family: {path} has NAME = {module.NAME!r}, a family of textmill; choose another name"
        )
    defaults = {"OBJECTIVE": "next_token", "BATCH_FIELDS": frozenset({"documents"}), "known_weights": _unchanged}
    for name, value in defaults.items():
        if not hasattr(module, name):
            setattr(module, name, value)
    if isinstance(getattr(module, "SIZES", None), dict):
        vars(module)["shape_of"] = partial(_shape_of_known_size, module.shape_of, module.SIZES)


def _shape_of_known_size(
    shape_of: Callable[..., Shape], sizes: dict[str, Any], config: ModelConfig, **given: Any
) -> Shape:
    """The file's `shape_of`, for a size that it has."""
    if config.size not in sizes:
        raise TextmillError(
            f"model.size: {config.family} has no size '{config.size}'; choose one of {', '.join(sizes)}"
        )
    return shape_of(config, **given)


def _unchanged(named: Iterable[object]) -> Iterable[object]:
    return named


def find_family_file(name: str) -> OwnFile | None:
    """The loaded file of a family, by the family's name."""
    return _loaded.get(name)


def loaded_family_files() -> list[str]:
    """The paths of all loaded files, for a process that opens the same models."""
    return [str(file.path) for file in _loaded.values()]
