"""File formats of models, one file each: `export.kind` and `textmill import --kind` name the file."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from textmill.config import ExportConfig
from textmill.conversion.model import Files, Hints, Model
from textmill.errors import TextmillError

KINDS = tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__"))


class Format(Protocol):
    """What a file of this folder offers."""

    PRECISIONS: tuple[str, ...]
    """Values of `export.precision` that it can write; empty: it is only read."""

    def write(self, model: Model, folder: Path, config: ExportConfig) -> Files:
        """Write the model into an empty folder; only formats with PRECISIONS have it."""
        ...

    def matches(self, path: Path) -> bool:
        """Whether a file or folder looks like this format; a cheap look at names and first bytes."""
        ...

    def read(self, path: Path, hints: Hints) -> Model:
        """Read a file or folder, with the format's own package if there is one; never run code from it."""
        ...


def open_format(kind: str) -> Format:
    """The format of a name."""
    return cast(Format, import_module(f"textmill.conversion.formats.{kind}"))


def find_kind(path: Path, kind: str | None = None) -> str:
    """The name of the format of a file or folder: the named one, or the first that matches."""
    if kind is not None and kind not in KINDS:
        raise TextmillError(f"--kind: no format '{kind}'; choose one of {', '.join(KINDS)}")
    if not path.exists():
        raise TextmillError(f"{path}: no such file or folder")
    if kind is not None:
        return kind
    for name in KINDS:
        if open_format(name).matches(path):
            return name
    raise TextmillError(f"{path}: no model that textmill knows; name its format with --kind, one of {', '.join(KINDS)}")
