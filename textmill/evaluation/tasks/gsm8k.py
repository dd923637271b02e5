"""GSM8K: word problems of arithmetic; the model writes a solution, and its number is compared."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from textmill.config import EvaluateConfig
from textmill.errors import TextmillError
from textmill.evaluation.data_files import Record, open_data_file, read_items, sample, sample_card, text_of
from textmill.evaluation.examples import Examples, choose_examples, named
from textmill.evaluation.metrics import proportion_interval
from textmill.evaluation.task import ItemLog, Measured, NextTokenScorer, TaskEntry

FILES = "test.jsonl; examples: train.jsonl"
SOURCE = "https://github.com/openai/grade-school-math (grade_school_math/data), or openai/gsm8k on the Hugging Face hub"
EXAMPLES = Examples(named("train", "test"), count=5)
STOPS = ("Question:", "</s>", "<|im_end|>")
MAX_TOKENS = 256
STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
IGNORED = (re.compile(","), re.compile(r"\$"), re.compile(r"(?s).*#### "), re.compile(r"\.$"))
"""What is removed from both numbers before they are compared."""


def measure(scorer: NextTokenScorer, settings: EvaluateConfig, entry: TaskEntry) -> Measured:
    """Lines of {"question", "answer"}, whose answers end in "#### NUMBER"."""
    data = open_data_file(entry)
    every: list[tuple[str, str, str]] = []
    card: dict[str, object] = {}
    for path in data.files:
        records = list(read_items(path))
        shots = choose_examples(path, records, read_items, EXAMPLES, settings)
        card |= shots.card
        for (place, record), examples in zip(records, shots.by_record, strict=True):
            shown = "".join(f"{_question(one, where)} {text_of(one, 'answer', where)}\n\n" for where, one in examples)
            every.append((Path(place).name, shown + _question(record, place), text_of(record, "answer", place)))
    if not every:
        raise TextmillError(f"{data.path}: has no items; is it the right file?")
    items = sample(every, settings)
    written = scorer.write_texts([prompt for _, prompt, _ in items], STOPS, MAX_TOKENS)
    logs = [_grade(id_, text, answer) for (id_, _, answer), text in zip(items, written, strict=True)]
    right = {name: sum(log[name] for log in logs) for name in ("exact_match", "exact_match_flexible")}
    return Measured(
        {name: count / len(logs) for name, count in right.items()},
        {
            **data.card,
            "protocol": f"GSM8K as in lm-eval: greedy, at most {MAX_TOKENS} new tokens",
            **card,
            **sample_card(len(items), len(every)),
            "normalisation": "exact_match: the number after ####; exact_match_flexible: the last number",
            "interval": "95%, Wilson",
        },
        {name: proportion_interval(count, len(logs)) for name, count in right.items()},
        items=logs,
    )


def read_texts(entry: TaskEntry) -> Iterator[list[str]]:
    """Each question, alone and with its solution."""
    for path in open_data_file(entry).files:
        for place, record in read_items(path):
            question, answer = (text_of(record, key, place) for key in ("question", "answer"))
            yield [question, f"{question} {answer}"]


def _question(record: Record, place: str) -> str:
    return f"Question: {text_of(record, 'question', place)}\nAnswer:"


def _grade(id_: str, text: str, answer: str) -> ItemLog:
    strict = STRICT.findall(text)
    flexible = FLEXIBLE.findall(text)
    return {
        "id": id_,
        "text": text,
        "answer": _number(answer),
        "exact_match": float(bool(strict) and _number(strict[0]) == _number(answer)),
        "exact_match_flexible": float(bool(flexible) and _number(flexible[-1]) == _number(answer)),
    }


def _number(text: str) -> str:
    for pattern in IGNORED:
        text = pattern.sub("", text)
    return text.lower()
