"""BLiMP: English minimal pairs, by phenomenon."""

from __future__ import annotations

from dataclasses import replace

from textmill.evaluation.choices import Item
from textmill.evaluation.data_files import Record, text_of
from textmill.evaluation.tasks import pairs

FILES = "the folder data with its 67 files, or one of them, such as wh_island.jsonl"
SOURCE = "https://github.com/alexwarstadt/blimp, or nyu-mll/blimp on the Hugging Face hub"


def read_item(record: Record, place: str) -> Item:
    """One pair of a phenomenon, such as island_effects."""
    return replace(pairs.read_item(record, place), group=text_of(record, "linguistics_term", place))


TASK = replace(pairs.TASK, read_item=read_item, protocol=f"BLiMP as in lm-eval: {pairs.TASK.protocol}")
