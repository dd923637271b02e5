"""HellaSwag: which of four endings continues a text (published as hellaswag_val.jsonl)."""

from __future__ import annotations

import re

from textmill.config import EvaluateConfig
from textmill.errors import TextmillError
from textmill.evaluation.choices import Item, choice_item, measure_choices
from textmill.evaluation.data_files import Record, text_of
from textmill.evaluation.task import Measured, Scorer, TaskEntry

MARKUP = re.compile(r"\[.*?\]")


def measure(scorer: Scorer, settings: EvaluateConfig, entry: TaskEntry) -> Measured:
    """Lines of {"activity_label", "ctx_a", "ctx_b", "endings", "label"}."""
    return measure_choices(scorer, settings, entry, read_item, "HellaSwag as in lm-eval, no examples in the prompt")


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
