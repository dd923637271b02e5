"""PIQA: which of two solutions reaches a goal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from textmill.errors import TextmillError
from textmill.evaluation.choices import ChoiceTask, Item, choice_item, texts_of
from textmill.evaluation.data_files import Record, open_data_file, read_items, text_of
from textmill.evaluation.examples import Examples, named
from textmill.evaluation.task import TaskEntry

FILES = "valid.jsonl with valid-labels.lst; examples: train.jsonl with train-labels.lst"
SOURCE = "https://yonatanbisk.com/piqa, or ybisk/piqa on the Hugging Face hub"


def read_records(path: Path) -> Iterator[tuple[str, Record]]:
    """The records with their labels: those of NAME-labels.lst next to the file, or of the field `label`."""
    labels_file = path.with_name(f"{path.stem}-labels.lst")
    if not labels_file.is_file():
        yield from read_items(path)
        return
    labels = labels_file.read_text(encoding="utf-8", errors="replace").split()
    records = list(read_items(path))
    if len(labels) != len(records):
        raise TextmillError(f"{labels_file}: has {len(labels):,} labels, {path} has {len(records):,} items")
    for (place, record), label in zip(records, labels, strict=True):
        yield place, {"label": label, **record}


def read_texts(entry: TaskEntry) -> Iterator[list[str]]:
    """The texts of each question; their answers may be unknown."""
    for path in open_data_file(entry).files:
        for place, record in read_items(path):
            yield texts_of(read_item({**record, "label": 0}, place))


def read_item(record: Record, place: str) -> Item:
    """`Question: goal`, and both solutions as answers."""
    goal, *solutions = (text_of(record, key, place) for key in ("goal", "sol1", "sol2"))
    return choice_item(f"Question: {goal}\nAnswer:", solutions, record.get("label"), place)


TASK = ChoiceTask(read_item, "PIQA as in lm-eval", Examples(named("train", "valid"), validation=True), read_records)
