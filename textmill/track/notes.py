"""notes.jsonl: every note of a run with its time: starts, resumes, saves, skipped updates, and the environment."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from textmill import __version__

NOTES_FILE = "notes.jsonl"
PACKAGES = ("torch", "jax", "deepspeed", "numpy", "tokenizers")


class NoteLines:
    """Appends notes to a JSON Lines file; each process of a run starts with a line that has its environment."""

    def __init__(self, path: Path, *, append: bool) -> None:
        self._stream = open(path, "a" if append else "w", encoding="utf-8")
        self._write({"environment": environment()})

    def write(self, text: str) -> None:
        """Write one note; it is flushed at once."""
        self._write({"text": text})

    def _write(self, values: dict[str, Any]) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._stream.write(json.dumps({"time": now, **values}, ensure_ascii=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def environment() -> dict[str, str]:
    """Versions and machine, without names of hosts or users."""
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores"
    found = {"textmill": __version__, "python": platform.python_version(), "machine": machine}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def read_notes(path: Path) -> list[dict[str, Any]]:
    """Every complete line of a notes.jsonl; a killed run may leave an incomplete last one."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return [note for line in lines if isinstance(note := _parse(line), dict)]


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
