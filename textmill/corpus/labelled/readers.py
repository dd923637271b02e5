"""Read examples from files; the first mistake ends the command, with its file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from textmill.config import CorpusConfig
from textmill.corpus.labelled.conll import read_conll
from textmill.corpus.labelled.example import ANSWERS, SEQUENCES, WORDS, Example, format_place
from textmill.corpus.labelled.squad import read_article, read_question
from textmill.corpus.records import BadRecord
from textmill.corpus.source import Source
from textmill.corpus.sources import read_records, split_into_chunks
from textmill.corpus.text_fields import RECORD
from textmill.errors import TextmillError

ARTICLES = f"data[].{RECORD}"
"""The key of SQuAD's articles."""
LABEL_NAMES = ("label", "labels", "tags", "ner_tags")
WORD_NAMES = ("words", "tokens")
"""Fields that are tried, in this order, if no key is set."""

Record = dict[str, Any]


def read_examples(source: Source, task: str, config: CorpusConfig, *, needs_labels: bool = True) -> Iterator[Example]:
    """The examples of a source, in order; one without labels is an error if they are needed."""
    if source.format in ("text", "wiki", "mediawiki", "mongo"):
        if task != WORDS or source.format != "text":
            raise TextmillError(
                f"{source.name}: corpus.labels={task} reads CSV, JSON, Parquet or Arrow files; convert the file"
            )
        yield from read_conll(source)
        return
    is_squad = task == ANSWERS and source.format == "json"
    key = source.text_key or config.text_key
    for place, record in _read_records(source, ARTICLES if is_squad else RECORD, config):
        where = format_place(source.name, place)
        if not isinstance(record, dict):
            raise TextmillError(f"{where}: found no object with fields; each example needs one")
        if is_squad:
            yield from read_article(record, source.name, place)
        elif task == ANSWERS:
            yield read_question(record, source.name, place)
        else:
            read = _read_words if task == WORDS else _read_texts
            example = read(record, source.name, place, key, config.label_key)
            if needs_labels and not example.has_labels:
                raise TextmillError(
                    f"{where}: has no label; found the fields {_list_fields(record)}; add it, or set corpus.label_key"
                )
            yield example


def _read_records(source: Source, key: str, config: CorpusConfig) -> Iterator[tuple[str, object]]:
    """(place, record) of each record that is not blank."""
    config = config.model_copy(update={"keep_fields": [], "chat": None})
    for chunk in split_into_chunks([replace(source, text_key=key)], "section"):
        for found in read_records(chunk, config):
            if isinstance(found, BadRecord):
                raise TextmillError(f"{found}; correct it, or remove it")
            if found.text:
                yield found.id, json.loads(found.text)


def _read_texts(record: Record, source: str, place: str, key: str, label_key: str | None) -> Example:
    where = format_place(source, place)
    names = [name.strip() for name in key.split("+")]
    if len(names) > 2:
        raise TextmillError(f"corpus.text_key: '{key}' names {len(names)} texts; {SEQUENCES} reads one or two")
    for name in names:
        if not isinstance(record.get(name), str):
            problem = "is not text" if name in record else f"is missing; found {_list_fields(record)}"
            raise TextmillError(f"{where}: the field '{name}' {problem}; set corpus.text_key to TEXT or FIRST+SECOND")
    label = _find(record, [label_key] if label_key else LABEL_NAMES[:1])
    labels = None if label is None or label == "" else (_label_text(label, where),)
    return Example(source, place, tuple(record[name] for name in names), labels)


def _read_words(record: Record, source: str, place: str, key: str, label_key: str | None) -> Example:
    where = format_place(source, place)
    words = _find(record, WORD_NAMES if key == CorpusConfig().text_key else [key])
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        expected = "words" if key == CorpusConfig().text_key else key
        raise TextmillError(
            f"{where}: has no list of words in '{expected}'; found {_list_fields(record)}; set corpus.text_key"
        )
    labels = _find(record, [label_key] if label_key else LABEL_NAMES[1:])
    if labels is None:
        return Example(source, place, tuple(words))
    if not isinstance(labels, list) or len(labels) != len(words):
        found = f"{len(labels)} labels" if isinstance(labels, list) else f"{labels!r} as labels"
        raise TextmillError(f"{where}: {len(words)} words but {found}; each word needs one label")
    return Example(source, place, tuple(words), tuple(_label_text(label, where) for label in labels))


def _find(record: Record, names: Any) -> Any:
    return next((record[name] for name in names if name in record), None)


def _list_fields(record: Record) -> str:
    return ", ".join(sorted(map(str, record))[:12])


def _label_text(label: Any, where: str) -> str:
    """A label as text: a number keeps its form in the file."""
    empty = not label.strip() if isinstance(label, str) else label is None or label != label  # NaN differs from itself
    if isinstance(label, dict | list) or empty:
        raise TextmillError(f"{where}: the label is {label!r}; it must be text or a number")
    return label.strip() if isinstance(label, str) else json.dumps(label)
