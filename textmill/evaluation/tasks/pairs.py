"""Minimal pairs in any language: how often the model finds the good sentence likelier than the bad one."""

from __future__ import annotations

from textmill.evaluation.choices import ChoiceTask, Item, choice_item
from textmill.evaluation.data_files import Record, text_of

FILES = 'your own lines of {"sentence_good": ..., "sentence_bad": ...}'


def read_item(record: Record, place: str) -> Item:
    """One pair; the good sentence is the right answer."""
    sentences = [text_of(record, key, place) for key in ("sentence_good", "sentence_bad")]
    return choice_item("", sentences, 0, place)


TASK = ChoiceTask(read_item, "the likelier of two sentences, each after a space", objectives=("next_token", "masked"))
