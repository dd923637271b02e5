"""A cache file with the fastest matmul algorithm per GPU and shape: measuring them takes seconds of the first step."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from textmill.errors import TextmillError
from textmill.storage.files import file_lock, read_json, write_json

NAME = "matmuls-3.json"
"""The number changes when algorithms are searched, measured or named differently."""


def cache_path() -> Path:
    """The cache file, under XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "textmill" / NAME


def load_algorithm(gpu: str, matmul: str) -> bytes | None:
    """The algorithm chosen for a matmul on this GPU; empty: torch's own was fastest; None: not measured yet."""
    chosen = _read().get(gpu, {})
    try:
        return bytes.fromhex(chosen[matmul])
    except (KeyError, TypeError, ValueError):
        return None


def store_algorithm(gpu: str, matmul: str, algorithm: bytes) -> None:
    """Add a choice to the file, under a lock; do nothing if the file cannot be written or locked."""
    with suppress(OSError, RuntimeError, TextmillError):  # RuntimeError: no home directory
        cache_path().parent.mkdir(parents=True, exist_ok=True)
        with file_lock(cache_path().with_suffix(".lock"), None):
            cached_choices = _read()
            chosen = cached_choices.get(gpu)
            cached_choices[gpu] = {**(chosen if isinstance(chosen, dict) else {}), matmul: algorithm.hex()}
            write_json(cache_path(), cached_choices)


def _read() -> dict[str, Any]:
    """The file's content; empty if it is missing or damaged."""
    try:
        cached_choices = read_json(cache_path())
    except (RuntimeError, TextmillError):
        return {}
    return cached_choices if isinstance(cached_choices, dict) else {}
