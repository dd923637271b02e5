"""A cache file with the fastest matmul algorithm per GPU and shape: trying them takes seconds of the first step."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from textmill.errors import TextmillError
from textmill.storage.files import file_lock, read_json, write_json

NAME = "products-2.json"
"""The number changes when algorithms are searched or measured differently."""


def place() -> Path:
    """The cache file, under XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "textmill" / NAME


def kept(card: str, form: str) -> bytes | None:
    """The algorithm chosen for a form on this GPU; empty: torch's own was fastest; None: not measured yet."""
    chosen = _read().get(card, {})
    try:
        return bytes.fromhex(chosen[form])
    except (KeyError, TypeError, ValueError):
        return None


def keep(card: str, form: str, way: bytes) -> None:
    """Add a choice to the file, under a lock; do nothing if the file cannot be written or locked."""
    with suppress(OSError, RuntimeError, TextmillError):  # RuntimeError: no home directory
        place().parent.mkdir(parents=True, exist_ok=True)
        with file_lock(place().with_suffix(".lock"), None):
            cached_choices = _read()
            chosen = cached_choices.get(card)
            cached_choices[card] = {**(chosen if isinstance(chosen, dict) else {}), form: way.hex()}
            write_json(place(), cached_choices)


def _read() -> dict[str, Any]:
    """The file's content; empty if it is missing or damaged."""
    try:
        cached_choices = read_json(place())
    except (RuntimeError, TextmillError):
        return {}
    return cached_choices if isinstance(cached_choices, dict) else {}
