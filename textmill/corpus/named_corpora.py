"""Named corpora: declared once in a corpora.yaml, used by name in `corpus.sources`."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from pathlib import Path

import yaml

from textmill.errors import TextmillError

KEYS = ("sources", "text_key")


@dataclass(frozen=True)
class Named:
    """What a name stands for."""

    sources: list[str]
    text_key: str | None


def open_corpora(path: str | None) -> dict[str, Named]:
    """The corpora of a file, by name; their paths are relative to it."""
    if path is None:
        return {}
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise TextmillError(f"corpus.corpora: {path}: not readable ({str(error).splitlines()[0]})") from None
    if not isinstance(tree, dict):
        raise TextmillError(f"{path}: found a {type(tree).__name__}; it is 'name:' lines with 'sources: [...]' below")
    return {str(name): _named(path, str(name), value) for name, value in tree.items()}


def _named(path: str, name: str, value: object) -> Named:
    if isinstance(value, str | list):
        value = {"sources": value}
    if not isinstance(value, dict) or "sources" not in value or set(value) - set(KEYS):
        found = sorted(map(str, value)) if isinstance(value, dict) else value
        raise TextmillError(f"{path}: {name}: found {found}; give it 'sources', and 'text_key' if it has its own")
    words = [value["sources"]] if isinstance(value["sources"], str) else value["sources"]
    key = value.get("text_key")
    if (
        not isinstance(words, list)
        or not words
        or not all(isinstance(word, str) for word in words)
        or not isinstance(key, str | None)
    ):
        raise TextmillError(f"{path}: {name}: 'sources' is a list of texts, 'text_key' a text")
    return Named([_beside(path, word) for word in words], key)


def _beside(path: str, word: str) -> str:
    """A path that is relative to the file; names and URLs are left alone."""
    if word.startswith("mongo:"):
        return "mongo:" + os.path.join(os.path.dirname(path), os.path.expanduser(word.removeprefix("mongo:")))
    if "://" in word or word.startswith("hf:"):
        return word
    full = os.path.join(os.path.dirname(path), os.path.expanduser(word))
    return full if os.path.exists(full) or glob.has_magic(word) or os.sep in word or "." in word else word
