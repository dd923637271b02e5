"""WinoGrande: which of two names fits into a sentence (published as dev.jsonl)."""

from __future__ import annotations

from textmill.config import EvaluateConfig
from textmill.errors import TextmillError
from textmill.evaluation.choices import Item, measure_choices
from textmill.evaluation.data_files import Record, text_of
from textmill.evaluation.task import Measured, Scorer, TaskEntry


def measure(scorer: Scorer, settings: EvaluateConfig, entry: TaskEntry) -> Measured:
    """Lines of {"sentence", "option1", "option2", "answer"}."""
    protocol = "WinoGrande as in lm-eval: the likelihood of the text after the name, given each name"
    return measure_choices(scorer, settings, entry, read_item, protocol)


def read_item(record: Record, place: str) -> Item:
    """Two contexts, one for each name, with the rest of the sentence as continuation."""
    sentence, *options = (text_of(record, key, place) for key in ("sentence", "option1", "option2"))
    before, gap, after = sentence.partition("_")
    answer = str(record.get("answer"))
    if not gap or not after.strip():
        raise TextmillError(f"{place}: the sentence is {sentence!r}; it needs '_' and some text after it")
    if answer not in ("1", "2"):
        raise TextmillError(f"{place}: the answer is {answer!r}; WinoGrande has 1 or 2 there")
    contexts = tuple(before + option for option in options)
    return Item(tuple((context, f" {after.strip()}") for context in contexts), contexts, int(answer) - 1, place)
