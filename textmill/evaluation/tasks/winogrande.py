"""WinoGrande: which of two names fits into a sentence."""

from __future__ import annotations

from textmill.errors import TextmillError
from textmill.evaluation.choices import ChoiceTask, Item
from textmill.evaluation.data_files import Record, text_of
from textmill.evaluation.examples import Examples, named

FILES = "dev.jsonl; examples: train_xl.jsonl"
SOURCE = "https://winogrande.allenai.org (winogrande_1.1), or allenai/winogrande on the Hugging Face hub"


def read_item(record: Record, place: str) -> Item:
    """Two contexts, one for each name, with the rest of the sentence as continuation."""
    sentence, *options = (text_of(record, key, place) for key in ("sentence", "option1", "option2"))
    before, gap, after = sentence.partition("_")
    answer = str(record.get("answer"))
    if not gap or not after.strip():
        raise TextmillError(f"{place}: the sentence is {sentence!r}; it needs '_' and some text after it")
    if answer not in ("1", "2"):
        raise TextmillError(f"{place}: the answer is {answer!r}; WinoGrande has 1 or 2 there")
    contexts = tuple(before + option for option in options)
    return Item(tuple((context, f" {after.strip()}") for context in contexts), contexts, int(answer) - 1, place)


TASK = ChoiceTask(
    read_item,
    "WinoGrande as in lm-eval: the likelihood of the text after the name, given each name",
    Examples(named("train_xl", "dev"), validation=True),
)
