"""HellaSwag: which of four endings continues a text."""

from __future__ import annotations

import re

from textmill.errors import TextmillError
from textmill.evaluation.choices import ChoiceTask, Item, choice_item
from textmill.evaluation.data_files import Record, text_of
from textmill.evaluation.examples import Examples, named

FILES = "hellaswag_val.jsonl; examples: hellaswag_train.jsonl"
SOURCE = "https://github.com/rowanz/hellaswag (data)"
MARKUP = re.compile(r"\[.*?\]")


def read_item(record: Record, place: str) -> Item:
    """`Activity: context`, without WikiHow's markup."""
    activity, start, end = (text_of(record, key, place) for key in ("activity_label", "ctx_a", "ctx_b"))
    endings = record.get("endings")
    if not isinstance(endings, list):
        raise TextmillError(f"{place}: the field 'endings' is {endings!r}; HellaSwag has a list of four texts there")
    context = _clean(f"{activity}: {start} {end.capitalize()}")
    return choice_item(context, [_clean(str(ending)) for ending in endings], record.get("label"), place)


def _clean(text: str) -> str:
    return MARKUP.sub("", text.strip().replace(" [title]", ". ")).replace("  ", " ")


TASK = ChoiceTask(read_item, "HellaSwag as in lm-eval", Examples(named("_train", "_val"), validation=True))
