"""Which way of making a product was the fastest on a card, kept in a file of the user's: trying them takes seconds of a first step."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from textmill.errors import TextmillError
from textmill.storage.files import locked, read_json, write_json

NAME = "products-2.json"
"""Another number where ways are found or tried otherwise."""


def place() -> Path:
    """The file: in the folder for what can be made again, which XDG_CACHE_HOME moves elsewhere."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "textmill" / NAME


def kept(card: str, form: str) -> bytes | None:
    """The way that was chosen for a form on such a card, nothing if it was torch's own; None: there is no choice yet."""
    chosen = _read().get(card, {})
    try:
        return bytes.fromhex(chosen[form])
    except (KeyError, TypeError, ValueError):
        return None


def keep(card: str, form: str, way: bytes) -> None:
    """Note a choice beside those that other processes have noted; where nothing can be written or locked, nothing is."""
    with suppress(OSError, RuntimeError, TextmillError):  # RuntimeError: the user has no home
        place().parent.mkdir(parents=True, exist_ok=True)
        with locked(place().with_suffix(".lock"), None):
            held = _read()
            chosen = held.get(card)
            held[card] = {**(chosen if isinstance(chosen, dict) else {}), form: way.hex()}
            write_json(place(), held)


def _read() -> dict[str, Any]:
    """All that is kept; a file that is not there or damaged keeps nothing."""
    try:
        held = read_json(place())
    except (RuntimeError, TextmillError):
        return {}
    return held if isinstance(held, dict) else {}
