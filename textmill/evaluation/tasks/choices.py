"""Multiple choice in textmill's own JSON lines, or in any fields that a task file names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from textmill.errors import TextmillError
from textmill.evaluation.choices import ChoiceTask, Item, choice_item
from textmill.evaluation.data_files import Record, text_of
from textmill.evaluation.task import TaskEntry
from textmill.evaluation.tasks import fill_template, value_of

FILES = 'your own lines of {"context": ..., "choices": [...], "answer": 0}'


def task_for(entry: TaskEntry) -> ChoiceTask:
    """The task with the templates of a task file, if that has any."""
    templates = {key: value for key, value in entry.options.items() if key != "evaluate"}
    if not templates:
        return TASK
    return replace(TASK, read_item=lambda record, place: _from_template(record, place, templates))


def read_item(record: Record, place: str) -> Item:
    """An item in textmill's own fields; `delimiter` is put before each choice, by default a space."""
    choices = record.get("choices")
    if not isinstance(choices, list):
        raise TextmillError(f"{place}: the field 'choices' is {choices!r}; write a list of texts")
    delimiter = record.get("delimiter", " ")
    return choice_item(text_of(record, "context", place), choices, record.get("answer"), place, str(delimiter))


def _from_template(record: Record, place: str, templates: Mapping[str, Any]) -> Item:
    """`context` is a template; `choices` a list of templates, or the name of a field with a list; `answer` the name of
    a field, or a number."""
    choices = templates.get("choices", "choices")
    answer = templates.get("answer", "answer")
    if isinstance(choices, str):
        values = value_of(record, choices.strip("{}"), place)
        if not isinstance(values, list):
            raise TextmillError(f"{place}: the field '{choices}' is {values!r}; choices are a list of texts")
        texts = [str(text) for text in values]
    elif isinstance(choices, list):
        texts = [fill_template(str(template), record, place) for template in choices]
    else:
        raise TextmillError(f"task: choices is {choices!r}; name a field, or give a list of templates")
    right_answer = value_of(record, answer.strip("{}"), place) if isinstance(answer, str) else answer
    context = fill_template(str(templates.get("context", "{context}")), record, place)
    return choice_item(context, texts, right_answer, place, str(templates.get("delimiter", " ")))


TASK = ChoiceTask(read_item, "the likeliest continuation of the context", objectives=("next_token", "masked"))
