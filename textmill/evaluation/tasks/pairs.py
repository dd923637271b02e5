"""Minimal pairs, as in BLiMP: how often the model finds the good sentence likelier than the bad one."""

from __future__ import annotations

from textmill.config import EvaluateConfig
from textmill.evaluation.choices import Item, choice_item, measure_choices
from textmill.evaluation.data_files import Record, text_of
from textmill.evaluation.task import Measured, Scorer, TaskEntry

OBJECTIVES = ("next_token", "masked")
"""A masked model scores by pseudo-log-likelihoods."""


def measure(scorer: Scorer, settings: EvaluateConfig, entry: TaskEntry) -> Measured:
    """Lines of {"sentence_good": ..., "sentence_bad": ...}, in any language."""
    protocol = "the likelier of two sentences"
    if scorer.objective == "next_token":
        protocol += ", each after an end-of-text token and a space"
    return measure_choices(scorer, settings, entry, read_item, protocol)


def read_item(record: Record, place: str) -> Item:
    """One pair; the good sentence is the right answer."""
    sentences = [text_of(record, key, place) for key in ("sentence_good", "sentence_bad")]
    return choice_item("", sentences, 0, place)
