"""Evaluation tasks: one file each, found by its name in `evaluate.tasks`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from textmill.config import EvaluateConfig
from textmill.config.load import read_yaml, under
from textmill.config.own_files import open_own_file
from textmill.config.usage import LM_EVAL, is_task_file, own_task_file, task_names
from textmill.corpus.decontamination import EvaluationData, open_text_data
from textmill.errors import TextmillError
from textmill.evaluation.choices import ChoiceTask, texts_of
from textmill.evaluation.data_files import Record, find_data_files, open_data_file, slug
from textmill.evaluation.measured_task import MeasuredTask
from textmill.evaluation.task import TaskEntry
from textmill.storage.files import hash_json


def open_tasks(entries: Sequence[str]) -> list[MeasuredTask]:
    """The tasks of `evaluate.tasks`, whose files must exist; which names exist is checked when the config is read."""
    parsed = [parse_entry(entry) for entry in entries]
    parts: list[Callable[[Path], str]] = [lambda file: slug(file.stem), lambda file: slug(str(file))]
    for label_part in parts:  # the file's name; if that is not enough, its path
        labels = Counter(entry.label for entry in parsed)
        parsed = [_relabel(entry, label_part) if labels[entry.label] > 1 else entry for entry in parsed]
    return [_open(entry) for entry in parsed]


def parse_entry(entry: str) -> TaskEntry:
    """The task, label and file of one entry of `evaluate.tasks`."""
    if is_task_file(entry):
        return read_task_file(Path(entry))
    if (own := own_task_file(entry)) is not None:
        label = slug(Path(own).stem)
        file = entry.removeprefix(own).removeprefix(":")
        code = open_own_file(own, "evaluate.tasks")
        if not hasattr(code.module, "measure") and not hasattr(code.module, "TASK"):
            raise TextmillError(f"evaluate.tasks: {own} does not define measure; see docs/own-parts.md")
        return TaskEntry(label, label, Path(file) if file else None, code=code)
    name, _, file = entry.partition(":")
    if name == LM_EVAL:
        return TaskEntry(name, Path(file).name, Path(file))
    return TaskEntry(name, name, Path(file) if file else None)


def _relabel(entry: TaskEntry, label_part: Callable[[Path], str]) -> TaskEntry:
    """An entry whose label has a part of its file's path."""
    return replace(entry, label=f"{entry.label}-{label_part(entry.file)}") if entry.file else entry


def _open(entry: TaskEntry) -> MeasuredTask:
    if entry.name == LM_EVAL:
        if find_spec("lm_eval") is None:
            raise TextmillError(f"evaluate.tasks: {LM_EVAL} needs lm-eval; run: pip install 'textmill[eval]'")
        adapter = "textmill.evaluation.lm_eval_adapter"
        return MeasuredTask(
            entry,
            lambda *given: import_module(adapter).measure(*given),
            takes_shots=True,
            read=lambda _, entry: import_module(adapter).load_tasks(entry),
        )
    module: Any = entry.code.module if entry.code else import_module(f"textmill.evaluation.tasks.{entry.name}")
    needs_file = hasattr(module, "FILES") and not getattr(module, "FILE_OPTIONAL", False)
    if entry.file is not None or needs_file:
        find_data_files(entry)
    if (task := _choice_task(module, entry)) is not None:
        return MeasuredTask(entry, task.measure, task.objectives, takes_shots=True, read=task.read)
    objectives = getattr(module, "OBJECTIVES", ("next_token",))
    has_texts = entry.file is not None and hasattr(module, "read_texts")
    read = partial(_read_texts, module) if has_texts else None
    return MeasuredTask(
        entry,
        module.measure,
        objectives,
        takes_shots=hasattr(module, "EXAMPLES"),
        read=read,
        find_windows=getattr(module, "find_windows", None),
    )


def _read_texts(module: Any, settings: EvaluateConfig, entry: TaskEntry) -> None:
    """Read the texts of all examples; what cannot be read is an error."""
    for _ in module.read_texts(entry):
        pass


def _choice_task(module: Any, entry: TaskEntry) -> ChoiceTask | None:
    """The multiple choice of a task's file: its `TASK`, or what its `task_for` makes of the entry."""
    task: ChoiceTask | None = getattr(module, "TASK", None)
    return module.task_for(entry) if hasattr(module, "task_for") else task


def list_tasks() -> str:
    """Every task with what it measures, what its files are called and where they come from."""
    lines: list[str] = []
    for name in task_names():
        module = import_module(f"textmill.evaluation.tasks.{name}")
        summary = " ".join((module.__doc__ or "").split("\n\n")[0].split())
        lines += [f"{name}: {summary}", f"    files: {getattr(module, 'FILES', 'none')}"]
        lines += [f"    from:  {module.SOURCE}"] if hasattr(module, "SOURCE") else []
    lines.append("Nothing is downloaded: evaluate.tasks=[NAME:FILE] reads files that you name.")
    return "\n".join(lines)


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


def open_evaluation_data(entry: str) -> EvaluationData:
    """An entry of `corpus.decontaminate`: TASK:FILE or a task file as in `evaluate.tasks`, or a file of text."""
    name, colon, _ = entry.partition(":")
    if not is_task_file(entry) and not (colon and name in task_names()):
        return open_text_data(entry)
    task = parse_entry(entry)
    module = import_module(f"textmill.evaluation.tasks.{task.name}")
    if task.file is None or not (hasattr(module, "read_texts") or hasattr(module, "TASK")):
        raise TextmillError(
            f"corpus.decontaminate: '{entry}' names no file of examples; name TASK:FILE, or a file of text"
        )
    kind = f"{task.name} {hash_json(dict(task.options))[:16]}" if task.options else task.name
    data = open_data_file(task)
    return EvaluationData(data.path, lambda: _read(module, task), kind, data.sha256)


def _read(module: Any, task: TaskEntry) -> Iterator[Sequence[str]]:
    """The texts of each example: those that the module reads itself, or the contexts of its items alone and with each
    candidate, without the labels of the prompt."""
    if hasattr(module, "read_texts"):
        read_texts: Callable[[TaskEntry], Iterator[Sequence[str]]] = module.read_texts
        yield from read_texts(task)
        return
    choice_task = _choice_task(module, task)
    assert choice_task is not None
    for file in open_data_file(task).files:
        for place, record in choice_task.read_records(file):
            yield texts_of(choice_task.read_item(record, place))
