"""A user's own task: a YAML file of a few lines that names a kind of task, a file of data, and templates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from textmill.config.evaluation import task_names
from textmill.config.load import read_yaml
from textmill.config.paths import under
from textmill.errors import TextmillError
from textmill.evaluation.data_files import Record
from textmill.evaluation.task import TaskEntry

OWN_KEYS = ("task", "name", "file", "sha256", "evaluate")
"""Keys of every task file; those of TEMPLATE_KEYS belong to multiple choice."""
TEMPLATE_KEYS = ("context", "choices", "answer", "delimiter")
FIELD = re.compile(r"\{([^{}]+)\}")


def read_task_file(path: Path) -> TaskEntry:
    """Read a task file; its `file` is relative to it."""
    if not path.is_file():
        raise TextmillError(f"{path}: no such file; evaluate.tasks names it as a task")
    tree, lines = read_yaml(path)
    allowed = (*OWN_KEYS, *TEMPLATE_KEYS)
    if unknown := [key for key in tree if key not in allowed]:
        raise TextmillError(f"{path}:{lines[unknown[0]]}: no such key '{unknown[0]}'; a task has {', '.join(allowed)}")
    kind, name, file, sha256 = (tree.get(key) for key in ("task", "name", "file", "sha256"))
    if kind not in task_names():
        raise TextmillError(f"{path}: task is {kind!r}; choose from {', '.join(task_names())}")
    if kind != "choices" and (templates := [key for key in TEMPLATE_KEYS if key in tree]):
        raise TextmillError(f"{path}:{lines[templates[0]]}: '{templates[0]}' belongs to task: choices; remove it")
    for key, value in (("name", name), ("file", file), ("sha256", sha256)):
        if value is not None and not isinstance(value, str):
            raise TextmillError(f"{path}:{lines[key]}: {key} is {value!r}; write text")
    options = {key: value for key, value in tree.items() if key in (*TEMPLATE_KEYS, "evaluate")}
    label = name or path.stem
    if not re.fullmatch(r"[\w.-]+", label):
        raise TextmillError(f"{path}: name is {label!r}; use letters, digits, '.', '-' and '_'")
    return TaskEntry(str(kind), label, Path(under(path.resolve().parent, file)) if file else None, sha256, options)


def fill_template(template: str, record: Record, place: str) -> str:
    """A template with each {field} or {outer.inner} replaced by that field of the record."""
    return FIELD.sub(lambda match: str(value_of(record, match[1], place)), template)


def value_of(record: Record, key: str, place: str) -> Any:
    """A field of a record; `a.b` reaches into an object, `a.0` into a list."""
    value: Any = record
    for part in key.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise TextmillError(f"{place}: no field '{key}'; the record has {', '.join(record)}")
    return value
