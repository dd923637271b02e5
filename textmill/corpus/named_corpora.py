"""Read corpora.yaml, which gives names to lists of sources for use in `corpus.sources`."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from pathlib import Path

import yaml

from textmill.errors import TextmillError

KEYS = ("sources", "text_key")


@dataclass(frozen=True)
class NamedCorpus:
    """The sources behind a name, and the field that holds their text."""

    sources: list[str]
    text_key: str | None


def read_corpora_file(path: str | None) -> dict[str, NamedCorpus]:
    """Read the named corpora of a file; paths in it are relative to the file."""
    if path is None:
        return {}
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise TextmillError(f"corpus.corpora_file: {path}: not readable ({str(error).splitlines()[0]})") from None
    if not isinstance(tree, dict):
        raise TextmillError(
            f"{path}: expected 'name:' lines with 'sources: [...]' below; found a {type(tree).__name__}"
        )
    return {str(name): _parse_corpus(path, str(name), value) for name, value in tree.items()}


def _parse_corpus(path: str, name: str, value: object) -> NamedCorpus:
    if isinstance(value, str | list):
        value = {"sources": value}
    if not isinstance(value, dict) or "sources" not in value or set(value) - set(KEYS):
        found = sorted(map(str, value)) if isinstance(value, dict) else value
        raise TextmillError(f"{path}: {name}: found {found}; expected 'sources' and optionally 'text_key'")
    entries = [value["sources"]] if isinstance(value["sources"], str) else value["sources"]
    key = value.get("text_key")
    if (
        not isinstance(entries, list)
        or not entries
        or not all(isinstance(entry, str) for entry in entries)
        or not isinstance(key, str | None)
    ):
        raise TextmillError(f"{path}: {name}: 'sources' must be a list of strings, 'text_key' a string")
    return NamedCorpus([_resolve_entry(path, entry) for entry in entries], key)


def _resolve_entry(path: str, entry: str) -> str:
    """Make a path relative to the file's folder; names and URLs stay as they are."""
    if entry.startswith("mongo:"):
        return "mongo:" + os.path.join(os.path.dirname(path), os.path.expanduser(entry.removeprefix("mongo:")))
    if "://" in entry or entry.startswith("hf:"):
        return entry
    full_path = os.path.join(os.path.dirname(path), os.path.expanduser(entry))
    return full_path if os.path.exists(full_path) or glob.has_magic(entry) or os.sep in entry or "." in entry else entry
