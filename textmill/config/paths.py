"""Paths of a config: relative to the file, or the folder, in which they are set."""

from __future__ import annotations

import os
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

from textmill.config.evaluation import LM_EVAL, is_task_file, task_names
from textmill.config.keys import all_fields
from textmill.config.load import Tree, read_yaml
from textmill.config.section import field_markers
from textmill.errors import TextmillError

CORPORA = Path(__file__).parents[1] / "corpora"
MARKERS = {"path", "source", "models", "task_files", "evaluation_files"}
"""The markers of fields that hold paths."""
CORPORA_FILE = "corpora.yaml"
"""Where named corpora are declared, if the file is next to a config."""


def resolve_paths(tree: Tree, base: Path, names: set[str] | None = None) -> Tree:
    """The tree with full paths, read relative to `base`; names of corpora and of the hub stay as they are.

    `names` are corpora that are already known; without them the tree is a file's, and a corpora.yaml next to it is
    used.
    """
    resolved = deepcopy(tree)
    in_file = names is None
    names = (names or set()) | corpora_names(tree, base)
    for key, field in all_fields():
        markers = field_markers(field)
        *sections, name = key.split(".")
        settings: Any = resolved
        for section in sections:
            settings = settings.get(section) if isinstance(settings, dict) else None
        if MARKERS & markers.keys() and isinstance(settings, dict) and name in settings:
            settings[name] = _resolve_value(base, settings[name], markers, names)
    corpus = resolved.setdefault("corpus", {})
    if in_file and isinstance(corpus, dict) and "corpora_file" not in corpus and (base / CORPORA_FILE).is_file():
        corpus["corpora_file"] = str(base / CORPORA_FILE)
    return resolved


def _resolve_value(base: Path, value: Any, markers: dict[str, Any], names: set[str]) -> Any:
    """The value of a field with one of MARKERS; a value of a wrong type is left to the check of types."""
    if isinstance(value, list):
        if markers.get("task_files"):
            return [_resolve_task(base, item) for item in value]
        if markers.get("evaluation_files"):
            return [_resolve_evaluation(base, item) for item in value]
        if markers.get("models"):
            return [_resolve_existing(base, item) if isinstance(item, str) else item for item in value]
        return [_resolve_item(base, item, names) for item in value]
    if not isinstance(value, str) or markers.get("task_files") or markers.get("evaluation_files"):
        return value
    if not value.endswith(markers.get("suffix", "")):
        return value
    return under(base, value) if markers.get("path") else _resolve_existing(base, value)


def _resolve_existing(base: Path, value: str) -> str:
    """The full path of a value if it exists, else the value, which may be a name."""
    full = under(base, value)
    return full if os.path.exists(full) else value


def corpora_names(tree: Tree, base: Path) -> set[str]:
    """The names that a corpora.yaml declares: the file that `corpus.corpora_file` names, or the one in `base`."""
    corpus = tree.get("corpus")
    named = corpus.get("corpora_file") if isinstance(corpus, dict) else None
    path = Path(under(base, named)) if isinstance(named, str) else base / CORPORA_FILE
    return set(read_yaml(path)[0]) if path.is_file() else set()


def under(base: Path, value: str) -> str:
    """The full path of a value; ~ and $NAME are expanded, unless a file has exactly this name; a URL stays."""
    if "://" in value:
        return value
    if "$" in value and not os.path.exists(base / value):
        value = os.path.expandvars(value)
        if unset := re.search(r"\$(\w+|\{[^}]*\})", value):
            raise TextmillError(f"{value}: the environment variable {unset[0]} is not set; set it, or write the path")
    return os.path.normpath(base / os.path.expanduser(value))


def _resolve_task(base: Path, task: Any) -> Any:
    """An entry of `evaluate.tasks` with a full path: NAME:FILE, a YAML file, or lm-eval:FOLDER/NAME."""
    if not isinstance(task, str):
        return task
    if is_task_file(task):
        return under(base, task)
    name, colon, file = task.partition(":")
    return f"{name}:{under(base, file)}" if colon and (name != LM_EVAL or "/" in file) else task


def _resolve_evaluation(base: Path, item: Any) -> Any:
    """An entry of `corpus.decontaminate` with a full path: as in `evaluate.tasks`, or a file."""
    is_task = isinstance(item, str) and (is_task_file(item) or item.partition(":")[0] in (*task_names(), LM_EVAL))
    return under(base, item) if isinstance(item, str) and not is_task else _resolve_task(base, item)


def _resolve_item(base: Path, item: Any, names: set[str]) -> Any:
    if isinstance(item, dict) and isinstance(item.get("path"), str):
        return {**item, "path": under(base, item["path"])}
    return _resolve_source(base, item, names) if isinstance(item, str) else item


def _resolve_source(base: Path, value: str, names: set[str]) -> str:
    """A source's full path; a corpus by name, a URL and a hub name stay as they are."""
    if value.startswith("mongo:"):
        return "mongo:" + under(base, value.removeprefix("mongo:"))
    named = "://" in value or value.startswith("hf:") or value in names or (CORPORA / f"{value}.txt").is_file()
    return value if named else under(base, value)
