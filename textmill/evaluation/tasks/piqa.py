"""PIQA: which of two solutions reaches a goal (published as valid.jsonl and valid-labels.lst)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from textmill.config import EvaluateConfig
from textmill.errors import TextmillError
from textmill.evaluation.choices import Item, choice_item, measure_choices, texts_of
from textmill.evaluation.data_files import Record, open_data_file, read_items, text_of
from textmill.evaluation.task import Measured, Scorer, TaskEntry
from textmill.storage.files import hash_file


def measure(scorer: Scorer, settings: EvaluateConfig, entry: TaskEntry) -> Measured:
    """Lines of {"goal", "sol1", "sol2"}; the answers are in the field `label`, or in NAME-labels.lst next to the
    file."""
    data = open_data_file(entry)
    labels = _read_labels(data.path)
    answers: dict[str, Any] = {}
    if labels is not None:
        places = [place for place, _ in read_items(data.path)]
        lines = labels.read_text(encoding="utf-8", errors="replace").split()
        if len(lines) != len(places):
            raise TextmillError(f"{labels}: has {len(lines):,} labels, {data.path} has {len(places):,} items")
        answers = dict(zip(places, lines, strict=True))

    def read(record: Record, place: str) -> Item:
        return read_item({"label": answers.get(place), **record}, place)

    measured = measure_choices(scorer, settings, entry, read, "PIQA as in lm-eval, no examples in the prompt", data)
    if labels is not None:
        measured.card["labels_sha256"] = hash_file(labels)
    return measured


def read_texts(entry: TaskEntry) -> Iterator[list[str]]:
    """The texts of each question; their answers may be unknown."""
    for place, record in read_items(open_data_file(entry).path):
        yield texts_of(read_item({**record, "label": 0}, place))


def _read_labels(path: Path) -> Path | None:
    labels = path.with_name(f"{path.stem}-labels.lst")
    return labels if labels.is_file() else None


def read_item(record: Record, place: str) -> Item:
    """`Question: goal`, and both solutions as answers."""
    goal, *solutions = (text_of(record, key, place) for key in ("goal", "sol1", "sol2"))
    return choice_item(f"Question: {goal}\nAnswer:", solutions, record.get("label"), place)
