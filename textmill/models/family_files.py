"""Python files of the user's own, which run only if a setting names them: model families (`model.family`), found by
name from then on, and other parts of a run (`train.loss`, `train.optimizer`)."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from textmill.config import SIZES
from textmill.errors import TextmillError

NEEDED = ("NAME", "Net", "shape_of", "shape_of_hf", "hf_config_of", "weights_of", "small_shape")
"""What a family's file must define."""


@dataclass(frozen=True)
class FamilyFile:
    """A family of the user's own, from a file that was run."""

    path: Path
    sha256: str
    """Of the bytes that were loaded; recorded in every checkpoint, so that a changed file blocks a resume."""
    module: ModuleType


_files: dict[tuple[Path, str], FamilyFile] = {}
"""The files that were run, by path and checksum."""
_loaded: dict[str, FamilyFile] = {}
"""The loaded files by the names of their families."""


def load_family_file(name: str) -> FamilyFile:
    """Run the file, once for each content, and register its family under its own NAME."""
    found = _run_file(name, "model.family")
    if find_family_file(getattr(found.module, "NAME", "")) is not found:
        _check(found.module, found.path)
        _loaded[found.module.NAME] = found
    return found


def load_part(name: str, key: str, needed: str) -> Any:
    """The module of the file that a setting names; it must define `needed`."""
    module = _run_file(name, key).module
    if not hasattr(module, needed):
        raise TextmillError(f"{key}: {name} does not define {needed}; see docs/own-parts.md")
    return module


def hash_own_file(name: str, key: str) -> str:
    """The checksum of the file that a setting names."""
    return _run_file(name, key).sha256


def _run_file(name: str, key: str) -> FamilyFile:
    """Run a file, once for each content."""
    path = Path(os.path.abspath(name))
    try:
        source = path.read_bytes()
    except OSError as error:
        raise TextmillError(
            f"{key}: {name} is not readable ({error.strerror}); name a Python file that exists"
        ) from None
    sha256 = hashlib.sha256(source).hexdigest()
    if (known := _files.get((path, sha256))) is not None:
        return known
    module = ModuleType(f"textmill_own_{path.stem}_{sha256[:8]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look up their module
    try:
        exec(compile(source, path, "exec"), vars(module))
    except Exception as error:
        raise TextmillError(f"{key}: {path} fails when it is loaded: {type(error).__name__}: {error}") from error
    found = _files[path, sha256] = FamilyFile(path, sha256, module)
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
