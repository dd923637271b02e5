"""Python files of the user's own, which run only if a setting of the user's names them (docs/own-parts.md)."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from textmill.errors import TextmillError

OWN_SUFFIX = ".py"
"""The ending of such a file."""


def is_own_file(value: str) -> bool:
    """True if a setting names a Python file of the user's own instead of a part that comes with textmill."""
    return value.endswith(OWN_SUFFIX)


@dataclass(frozen=True)
class OwnFile:
    """A file that was run."""

    path: Path
    source: bytes
    sha256: str
    """Of the bytes that were loaded; recorded with what they make, so that a changed file blocks a resume."""
    module: ModuleType

    @property
    def described(self) -> str:
        """How the settings of a run record it."""
        return f"a file with SHA-256 {self.sha256}"


_files: dict[tuple[Path, str], OwnFile] = {}
"""The files that were run, by path and checksum."""
_latest: dict[Path, OwnFile] = {}
"""The content of each that was read last."""


def open_own_file(name: str, key: str, needed: str = "") -> OwnFile:
    """Read the file that a setting names, and run it, once for each content; it must define `needed`."""
    path = Path(os.path.abspath(name))
    try:
        source = path.read_bytes()
    except OSError as error:
        raise TextmillError(
            f"{key}: {name} is not readable ({error.strerror}); name a Python file that exists"
        ) from None
    sha256 = hashlib.sha256(source).hexdigest()
    if (path, sha256) not in _files:
        module = ModuleType(f"textmill_own_{path.stem}_{sha256[:8]}")
        module.__file__ = str(path)
        sys.modules[module.__name__] = module  # dataclasses look up their module
        try:
            exec(compile(source, path, "exec"), vars(module))
        except Exception as error:
            raise TextmillError(f"{key}: {path} fails when it is loaded: {type(error).__name__}: {error}") from error
        _files[path, sha256] = OwnFile(path, source, sha256, module)
    file = _files[path, sha256]
    if needed and not callable(getattr(file.module, needed, None)):
        raise TextmillError(f"{key}: {name} does not define {needed}; see docs/own-parts.md")
    _latest[path] = file
    return file


def last_own_file(name: str, key: str, needed: str) -> OwnFile:
    """The file that a setting names as `open_own_file` read it last: to edit it does not change a run that goes on."""
    return _latest.get(Path(os.path.abspath(name))) or open_own_file(name, key, needed)


def load_part(name: str, key: str, needed: str) -> Any:
    """The function `needed` of the file that a setting names, as it was read last."""
    return getattr(last_own_file(name, key, needed).module, needed)
