"""Model families in the user's own files: loaded when `model.family` names one, and found by name from then on."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from textmill.config import SIZES
from textmill.errors import TextmillError

NEEDED = ("NAME", "Net", "shape_of", "shape_of_hf", "hf_config_of", "weights_of", "small_shape")
"""What a family's file must define."""


@dataclass(frozen=True)
class FamilyFile:
    """A loaded file."""

    path: Path
    sha256: str
    """Of the bytes that were loaded; recorded in every checkpoint, so that a changed file blocks a resume."""
    module: ModuleType


_loaded: dict[str, FamilyFile] = {}
"""The loaded files by the names of their families."""


def load_family_file(name: str) -> FamilyFile:
    """Run the file, once for each content, and register its family under its own NAME."""
    path = Path(os.path.abspath(name))
    try:
        source = path.read_bytes()
    except OSError as error:
        raise TextmillError(
            f"model.family: {name} is not readable ({error.strerror}); name a Python file that exists"
        ) from None
    sha256 = hashlib.sha256(source).hexdigest()
    for known in _loaded.values():
        if (known.path, known.sha256) == (path, sha256):
            return known
    module = ModuleType(f"textmill_family_{path.stem}_{sha256[:8]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look up their module
    try:
        exec(compile(source, path, "exec"), vars(module))
    except Exception as error:
        raise TextmillError(f"model.family: {path} fails when it is loaded: {type(error).__name__}: {error}") from error
    _check(module, path)
    found = FamilyFile(path, sha256, module)
    _loaded[module.NAME] = found
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


def _unchanged(named: Iterable[object]) -> Iterable[object]:
    return named


def find_family_file(name: str) -> FamilyFile | None:
    """The loaded file of a family, by the family's name."""
    return _loaded.get(name)


def loaded_family_files() -> list[str]:
    """The paths of all loaded files, for a process that opens the same models."""
    return [str(file.path) for file in _loaded.values()]
