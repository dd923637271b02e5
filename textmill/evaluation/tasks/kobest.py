"""KoBEST: five Korean tasks (BoolQ, COPA, HellaSwag, SentiNeg, WiC), recognised by the columns of the file."""

from __future__ import annotations

from typing import Any

from textmill.errors import TextmillError
from textmill.evaluation.choices import ChoiceTask, Item, choice_item
from textmill.evaluation.data_files import Record
from textmill.evaluation.examples import Examples, named

FILES = "test.tsv of any of the five tasks; examples: train.tsv"
SOURCE = "https://github.com/SKT-LSL/KoBEST_datarepo, or skt/kobest_v1 on the Hugging Face hub"
COLUMNS = {
    "Text": "paragraph",
    "Question": "question",
    "Answer": "label",
    "sentence": "premise",
    "1": "alternative_1",
    "2": "alternative_2",
    "Target": "word",
    "SENTENCE1": "context_1",
    "SENTENCE2": "context_2",
    "ANSWER": "label",
    "choice1": "ending_1",
    "choice2": "ending_2",
    "choice3": "ending_3",
    "choice4": "ending_4",
    "Label": "label",
}
"""The columns of the published TSV files, and the fields of the same data on the hub."""
CONNECTORS = {"원인": " 왜냐하면", "결과": " 그래서"}


def read_item(record: Record, place: str) -> Item:
    """The prompt and the candidates of whichever task has these fields."""
    is_hub = "label" in record and "choice1" not in record
    row = record if is_hub else {COLUMNS.get(key, key): value for key, value in record.items()}
    if not is_hub and "paragraph" in row and "question" not in row:
        row["sentence"] = row.pop("paragraph")
    label = _label(row.get("label"), place, from_one=not is_hub and "alternative_1" in row)
    match row:
        case {"paragraph": text, "question": question}:
            return choice_item(f"{text} 질문: {question} 답변: ", ["아니오", "예"], label, place)
        case {"premise": premise, "question": question, "alternative_1": one, "alternative_2": two}:
            connector = CONNECTORS.get(str(question).strip())
            if connector is None:
                raise TextmillError(f"{place}: the question is {question!r}; KoBEST COPA has 원인 or 결과 there")
            return choice_item(f"{premise} {connector}", [one, two], label, place)
        case {"context_1": one, "context_2": two, "word": word}:
            prompt = f"문장1: {one} 문장2: {two} 두 문장에서 {word}가 같은 뜻으로 쓰였나?"
            return choice_item(prompt, ["아니오", "예"], label, place)
        case {"context": context, "ending_1": _}:
            return choice_item(f"문장: {context}", [row.get(f"ending_{n}", "") for n in range(1, 5)], label, place)
        case {"sentence": sentence}:
            return choice_item(f"문장: {sentence} 긍부정:", ["부정", "긍정"], label, place)
    raise TextmillError(f"{place}: the columns {', '.join(record)} are those of no KoBEST task")


def _label(value: Any, place: str, from_one: bool) -> int:
    known = {"False": 0, "True": 1}
    if str(value) in known:
        return known[str(value)]
    if not str(value).isdecimal():
        raise TextmillError(f"{place}: the label is {value!r}; KoBEST has a number, True or False there")
    return int(value) - from_one


TASK = ChoiceTask(read_item, "KoBEST as in lm-eval", Examples(named("train", "test")))
