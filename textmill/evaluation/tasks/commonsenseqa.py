"""CommonsenseQA: questions with five answers (published as dev_rand_split.jsonl)."""

from __future__ import annotations

from textmill.config import EvaluateConfig
from textmill.errors import TextmillError
from textmill.evaluation.choices import Item, choice_item, measure_choices
from textmill.evaluation.data_files import Record
from textmill.evaluation.task import Measured, Scorer, TaskEntry
from textmill.evaluation.tasks.arc import read_question


def measure(scorer: Scorer, settings: EvaluateConfig, entry: TaskEntry) -> Measured:
    """Lines of {"question": {"stem", "choices": [{"text", "label"}]}, "answerKey"}, or the layout of the hub."""
    protocol = "CommonsenseQA as in lm-eval: the prompt lists the answers, their letters are the candidates"
    return measure_choices(scorer, settings, entry, read_item, protocol)


def read_item(record: Record, place: str) -> Item:
    """The question with its lettered answers; the candidates are the letters."""
    stem, labels, texts = read_question(record, place)
    key = record.get("answerKey")
    if key not in labels:
        raise TextmillError(f"{place}: answerKey is {key!r}; the choices have {', '.join(labels)}")
    answers = "".join(f"\n{label}. {text}" for label, text in zip(labels, texts, strict=True))
    return choice_item(f"Question: {stem.strip()}{answers}\nAnswer:", labels, labels.index(str(key)), place)
