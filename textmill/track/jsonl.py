"""metrics.jsonl: one line per logged step, with exact numbers; and notes.jsonl: every note of a run with its time
(starts, resumes, saves, skipped updates) and the environment.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from textmill import __version__
from textmill.storage.files import write_bytes

METRICS_FILE = "metrics.jsonl"
NOTES_FILE = "notes.jsonl"
PACKAGES = ("torch", "jax", "deepspeed", "numpy", "tokenizers")


class JsonLines:
    """Appends lines to a JSON Lines file; each line is flushed at once."""

    def __init__(self, path: Path) -> None:
        self._stream = open(path, "a", encoding="utf-8")

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write one line, `step` first; floats are written with the digits that give back the same float.

        JSON has no NaN and no infinity: they are written as null.
        """
        finite = {name: None if _is_not_finite(value) else value for name, value in values.items()}
        self._stream.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._stream.flush()

    def mark(self, step: int, text: str) -> None:
        """Write a line with the settings that change after this step."""
        self._stream.write(json.dumps({"step": step, "change": text}, ensure_ascii=False) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def truncate_after(path: Path, step: int) -> None:
    """Keep the complete lines up to a step; later steps run again, and a killed run may leave an incomplete line.

    A change after this step is dropped too: it was not saved, and the run marks it again if it still holds.
    """
    if not path.exists():
        return
    before = path.read_bytes()
    kept = [line for line, values in _parse_lines(before) if _is_kept(values, step)]
    after = b"".join(line + b"\n" for line in kept)
    if after != before:
        write_bytes(path, [after])


def _is_kept(values: dict[str, Any], step: int) -> bool:
    found = values.get("step")
    return isinstance(found, int) and (found < step or (found == step and "change" not in values))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, in order; none without the file."""
    return [values for values in read_notes(path) if isinstance(values.get("step"), int)]


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
    """The lines of a notes.jsonl, in order; none without the file."""
    return [values for _, values in _parse_lines(path.read_bytes())] if path.is_file() else []


def _parse_lines(content: bytes) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Every line that is a JSON object; a killed run may leave an incomplete last one."""
    for line in content.split(b"\n"):
        with suppress(ValueError):
            values = json.loads(line)
            if isinstance(values, dict):
                yield line, values
