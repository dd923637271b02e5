"""Multiple choice in textmill's own JSON lines, or in any fields that a task file names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from textmill.config import EvaluateConfig
from textmill.errors import TextmillError
from textmill.evaluation.choices import Item, ReadItem, choice_item, measure_choices, texts_of
from textmill.evaluation.data_files import Record, open_data_file, read_items, text_of
from textmill.evaluation.task import Measured, Scorer, TaskEntry
from textmill.evaluation.tasks import fill_template, value_of

OBJECTIVES = ("next_token", "masked")
"""A masked model scores by pseudo-log-likelihoods."""


def measure(scorer: Scorer, settings: EvaluateConfig, entry: TaskEntry) -> Measured:
    """Lines of {"context": ..., "choices": [...], "answer": 0}, or other fields with the templates of a task file."""
    return measure_choices(scorer, settings, entry, _reader(entry), "the likeliest continuation of the context")


def read_texts(entry: TaskEntry) -> Iterator[list[str]]:
    """The texts of each question."""
    read = _reader(entry)
    for place, record in read_items(open_data_file(entry).path):
        yield texts_of(read(record, place))


def _reader(entry: TaskEntry) -> ReadItem:
    templates = {key: value for key, value in entry.options.items() if key != "evaluate"}

    def read(record: Record, place: str) -> Item:
        return _from_template(record, place, templates) if templates else read_item(record, place)

    return read


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
