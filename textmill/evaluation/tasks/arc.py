"""ARC: science questions."""

from __future__ import annotations

from textmill.errors import TextmillError
from textmill.evaluation.choices import ChoiceTask, Item, choice_item
from textmill.evaluation.data_files import Record
from textmill.evaluation.examples import Examples, named

FILES = "ARC-Easy-Test.jsonl, ARC-Challenge-Test.jsonl; examples: ARC-Easy-Train.jsonl, ARC-Challenge-Train.jsonl"
SOURCE = "https://allenai.org/data/arc (ARC-V1-Feb2018), or allenai/ai2_arc on the Hugging Face hub"


def read_item(record: Record, place: str) -> Item:
    """`Question: stem`, and the texts of the choices as answers."""
    stem, _, texts, answer = read_question(record, place)
    return choice_item(f"Question: {stem}\nAnswer:", texts, answer, place)


def read_question(record: Record, place: str, key: str = "question") -> tuple[str, list[str], list[str], int]:
    """The question, the labels and texts of its choices, and the right one's number: nested as published, or flat as
    on the hub, with the question in the field `key`."""
    question = record.get("question")
    try:
        if isinstance(question, dict):
            choices = question["choices"]
            stem = str(question["stem"])
            labels = [one["label"] for one in choices]
            texts = [one["text"] for one in choices]
        else:
            stem = str(record[key])
            labels = list(record["choices"]["label"])
            texts = list(record["choices"]["text"])
    except (KeyError, TypeError):
        raise TextmillError(
            f"{place}: has no question with choices; it has the fields {', '.join(record)}; is it the right file?"
        ) from None
    answer = str(record.get("answerKey")).strip()
    if answer not in labels:
        raise TextmillError(f"{place}: answerKey is {answer!r}; the choices have {', '.join(labels)}")
    return stem, labels, texts, labels.index(answer)


TASK = ChoiceTask(read_item, "ARC as in lm-eval", Examples(named("Train", "Test", "Dev")))
