"""MMLU: questions of 57 subjects with four answers; a folder of files gives the accuracy of each subject too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from textmill.errors import TextmillError
from textmill.evaluation.choices import ChoiceTask, Item, choice_item
from textmill.evaluation.data_files import Record, read_items, stem_of, text_of
from textmill.evaluation.examples import Examples

FILES = "the folder data/test or one SUBJECT_test.csv; examples: data/dev/SUBJECT_dev.csv"
SOURCE = "https://github.com/hendrycks/test (data.tar), or cais/mmlu on the Hugging Face hub"
LETTERS = ["A", "B", "C", "D"]
COLUMNS = ["question", *LETTERS, "answer"]
"""The published tables have no titles."""


def read_records(path: Path) -> Iterator[tuple[str, Record]]:
    """The records with their subject, which the name of a published file says."""
    subject = stem_of(path).removesuffix("_test").removesuffix("_dev").removesuffix("_val")
    for place, record in read_items(path, COLUMNS):
        yield place, {"subject": subject, **record}


def read_item(record: Record, place: str) -> Item:
    """The question with its lettered answers; the candidates are the letters."""
    choices = record["choices"] if "choices" in record else [record.get(letter) for letter in LETTERS]
    if not isinstance(choices, list) or len(choices) != len(LETTERS):
        raise TextmillError(f"{place}: the field 'choices' is {choices!r}; MMLU has a list of four texts there")
    subject = str(record["subject"])
    answers = "".join(f"\n{letter}. {text}" for letter, text in zip(LETTERS, choices, strict=True))
    question = f"{text_of(record, 'question', place).strip()}{answers}\nAnswer:"
    about = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
    return replace(choice_item(question, LETTERS, record.get("answer"), place), group=subject, prefix=about)


TASK = ChoiceTask(
    read_item,
    "MMLU as in lm-eval: the prompt lists the answers, their letters are the candidates",
    Examples(lambda path: path.parent.parent / "dev" / path.name.replace("_test", "_dev"), first=True),
    read_records,
)
