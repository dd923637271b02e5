"""OpenBookQA: questions about elementary science, with four answers."""

from __future__ import annotations

from textmill.evaluation.choices import ChoiceTask, Item, choice_item
from textmill.evaluation.data_files import Record
from textmill.evaluation.examples import Examples, named
from textmill.evaluation.tasks.arc import read_question

FILES = "test.jsonl; examples: train.jsonl"
SOURCE = "https://allenai.org/data/open-book-qa (Data/Main), or allenai/openbookqa on the Hugging Face hub"


def read_item(record: Record, place: str) -> Item:
    """The question as it is, and the texts of the choices as its continuations."""
    stem, _, texts, answer = read_question(record, place, "question_stem")
    return choice_item(stem, texts, answer, place)


TASK = ChoiceTask(read_item, "OpenBookQA as in lm-eval", Examples(named("train", "test", "dev")))
