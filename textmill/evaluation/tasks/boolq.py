"""BoolQ: questions about a passage, answered by yes or no."""

from __future__ import annotations

from textmill.errors import TextmillError
from textmill.evaluation.choices import ChoiceTask, Item, choice_item
from textmill.evaluation.data_files import Record, text_of
from textmill.evaluation.examples import Examples, named

FILES = "dev.jsonl, or SuperGLUE's val.jsonl; examples: train.jsonl"
SOURCE = "https://github.com/google-research-datasets/boolean-questions, or aps/super_glue on the Hugging Face hub"


def read_item(record: Record, place: str) -> Item:
    """The passage and the question; the answer is `answer` as published, `label` in SuperGLUE."""
    passage, question = (text_of(record, key, place) for key in ("passage", "question"))
    answer = record.get("answer", record.get("label"))
    if answer not in (0, 1):  # false and true too
        raise TextmillError(f"{place}: the answer is {answer!r}; BoolQ has true or false there")
    return choice_item(f"{passage}\nQuestion: {question}?\nAnswer:", ["no", "yes"], int(answer), place)


TASK = ChoiceTask(read_item, "BoolQ as in lm-eval", Examples(named("train", "dev", "val"), validation=True))
