"""Evaluation tasks: one file each, found by its name in `evaluate.tasks`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from textmill.config.evaluation import LM_EVAL, is_task_file
from textmill.errors import TextmillError
from textmill.evaluation.data_files import slug
from textmill.evaluation.measured_task import MeasuredTask
from textmill.evaluation.task import Task, TaskEntry
from textmill.evaluation.task_files import read_task_file


def open_tasks(entries: Sequence[str]) -> list[Task]:
    """The tasks of `evaluate.tasks`; which names exist is checked when the config is read."""
    parsed = [parse_entry(entry) for entry in entries]
    parts: list[Callable[[Path], str]] = [lambda file: file.stem, lambda file: slug(str(file))]
    for label_part in parts:  # the file's name; if that is not enough, its path
        labels = Counter(entry.label for entry in parsed)
        parsed = [_relabel(entry, label_part) if labels[entry.label] > 1 else entry for entry in parsed]
    return [_open(entry) for entry in parsed]


def parse_entry(entry: str) -> TaskEntry:
    """The task, label and file of one entry of `evaluate.tasks`."""
    if is_task_file(entry):
        return read_task_file(Path(entry))
    name, _, file = entry.partition(":")
    if name == LM_EVAL:
        return TaskEntry(name, Path(file).name, Path(file))
    return TaskEntry(name, name, Path(file) if file else None)


def _relabel(entry: TaskEntry, label_part: Callable[[Path], str]) -> TaskEntry:
    """An entry whose label has a part of its file's path."""
    return replace(entry, label=f"{entry.label}-{label_part(entry.file)}") if entry.file else entry


def _open(entry: TaskEntry) -> Task:
    if entry.name == LM_EVAL:
        if find_spec("lm_eval") is None:
            raise TextmillError(f"evaluate.tasks: {LM_EVAL} needs lm-eval; run: pip install 'textmill[eval]'")
        return MeasuredTask(entry, lambda *given: import_module("textmill.evaluation.lm_eval_adapter").measure(*given))
    module = import_module(f"textmill.evaluation.tasks.{entry.name}")
    if hasattr(module, "format_table"):
        return cast(Task, module)
    return MeasuredTask(entry, module.measure, getattr(module, "OBJECTIVES", ("next_token",)))
