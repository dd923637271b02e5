"""CommonsenseQA: questions with five answers."""

from __future__ import annotations

from textmill.evaluation.choices import ChoiceTask, Item, choice_item
from textmill.evaluation.data_files import Record
from textmill.evaluation.examples import Examples, named
from textmill.evaluation.tasks.arc import read_question

FILES = "dev_rand_split.jsonl; examples: train_rand_split.jsonl"
SOURCE = "https://www.tau-nlp.org/commonsenseqa, or tau/commonsense_qa on the Hugging Face hub"


def read_item(record: Record, place: str) -> Item:
    """The question with its lettered answers; the candidates are the letters."""
    stem, labels, texts, answer = read_question(record, place)
    answers = "".join(f"\n{label}. {text}" for label, text in zip(labels, texts, strict=True))
    return choice_item(f"Question: {stem.strip()}{answers}\nAnswer:", labels, answer, place)


TASK = ChoiceTask(
    read_item,
    "CommonsenseQA as in lm-eval: the prompt lists the answers, their letters are the candidates",
    Examples(named("train", "dev"), validation=True),
)
