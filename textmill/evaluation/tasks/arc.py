"""ARC: science questions (published as ARC-Easy-Test.jsonl, ARC-Challenge-Test.jsonl ...)."""

from __future__ import annotations

from textmill.config import EvaluateConfig
from textmill.errors import TextmillError
from textmill.evaluation.choices import Item, choice_item, measure_choices
from textmill.evaluation.data_files import Record
from textmill.evaluation.task import Measured, Scorer, TaskEntry


def measure(scorer: Scorer, settings: EvaluateConfig, entry: TaskEntry) -> Measured:
    """Lines of {"question": {"stem", "choices": [{"text", "label"}]}, "answerKey"}, or the layout of the hub."""
    return measure_choices(scorer, settings, entry, read_item, "ARC as in lm-eval, no examples in the prompt")


def read_item(record: Record, place: str) -> Item:
    """`Question: stem`, and the texts of the choices as answers."""
    stem, labels, texts = read_question(record, place)
    key = record.get("answerKey")
    if key not in labels:
        raise TextmillError(f"{place}: answerKey is {key!r}; the choices have {', '.join(labels)}")
    return choice_item(f"Question: {stem}\nAnswer:", texts, labels.index(str(key)), place)


def read_question(record: Record, place: str) -> tuple[str, list[str], list[str]]:
    """The question, and the labels and texts of its choices: nested as published, or flat as on the hub."""
    question = record.get("question")
    try:
        if isinstance(question, dict):
            choices = question["choices"]
            return str(question["stem"]), [one["label"] for one in choices], [one["text"] for one in choices]
        return str(record["question"]), list(record["choices"]["label"]), list(record["choices"]["text"])
    except (KeyError, TypeError):
        raise TextmillError(
            f"{place}: has no question with choices; it has the fields {', '.join(record)}; is it the right file?"
        ) from None
