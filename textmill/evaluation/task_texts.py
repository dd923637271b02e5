"""The texts of a task's examples, for `corpus.decontaminate`: what a model should not have seen in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from textmill.config.evaluation import is_task_file, task_names
from textmill.corpus.decontamination.evaluation_data import EvaluationData, open_text_data
from textmill.errors import TextmillError
from textmill.evaluation.choices import ReadItem, texts_of
from textmill.evaluation.data_files import open_data_file, read_items
from textmill.evaluation.task import TaskEntry
from textmill.evaluation.tasks import parse_entry
from textmill.storage.files import hash_json


def open_evaluation_data(entry: str) -> EvaluationData:
    """An entry of `corpus.decontaminate`: TASK:FILE or a task file as in `evaluate.tasks`, or a file of text."""
    name, colon, _ = entry.partition(":")
    if not is_task_file(entry) and not (colon and name in task_names()):
        return open_text_data(entry)
    task = parse_entry(entry)
    module = import_module(f"textmill.evaluation.tasks.{task.name}")
    path = open_data_file(task).path if task.file else None
    if path is None or not (hasattr(module, "read_texts") or hasattr(module, "read_item")):
        raise TextmillError(
            f"corpus.decontaminate: '{entry}' names no file of examples; name TASK:FILE, or a file of text"
        )
    kind = f"{task.name} {hash_json(dict(task.options))[:16]}" if task.options else task.name
    return EvaluationData(path, lambda: _read(module, task), kind)


def _read(module: Any, task: TaskEntry) -> Iterator[Sequence[str]]:
    """The texts of each example: those that the module reads itself, or the contexts of its items alone and with each
    candidate, without the labels of the prompt."""
    assert task.file is not None
    if hasattr(module, "read_texts"):
        read_texts: Callable[[TaskEntry], Iterator[Sequence[str]]] = module.read_texts
        yield from read_texts(task)
        return
    read_item: ReadItem = module.read_item
    for place, record in read_items(task.file):
        yield texts_of(read_item(record, place))
