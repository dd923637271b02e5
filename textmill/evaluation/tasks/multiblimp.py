"""MultiBLiMP: minimal pairs of agreement in 101 languages, by phenomenon."""

from __future__ import annotations

from dataclasses import replace

from textmill.evaluation.choices import ChoiceTask, Item, choice_item
from textmill.evaluation.data_files import Record, text_of

FILES = "LANGUAGE/data.tsv, such as eng/data.tsv"
SOURCE = "jumelet/multiblimp on the Hugging Face hub"


def read_item(record: Record, place: str) -> Item:
    """One pair of a phenomenon, such as SV-#: number of subject and verb."""
    sentences = [text_of(record, key, place) for key in ("sen", "wrong_sen")]
    group = text_of(record, "phenomenon", place) if "phenomenon" in record else ""
    return replace(choice_item("", sentences, 0, place, delimiter=""), group=group)


TASK = ChoiceTask(
    read_item,
    "MultiBLiMP as in lm-eval: the likelier of two sentences, without a space before them",
    objectives=("next_token", "masked"),
)
