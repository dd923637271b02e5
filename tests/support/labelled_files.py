"""Small files of examples with labels that a tiny net learns in seconds."""

from __future__ import annotations

import json
import random
from pathlib import Path

SEQUENCES, WORDS, ANSWERS = "sequence-classification", "token-classification", "question-answering"
ENDINGS = {SEQUENCES: "csv", WORDS: "conll", ANSWERS: "json"}
FILLERS = "the film was a story about king and queen in castle with music".split()
NAMES, CITIES = "Kim Lee Ada Tom".split(), "Seoul Ankara Paris Lima".split()
GOOD, BAD = "good great fine lovely".split(), "bad awful poor horrid".split()

YAML = """
folder: .
corpus: {{labels: {task}, sources: [train.{end}, valid.{end}],
         source_splits: {{train.{end}: train, valid.{end}: valid}}}}
tokenizer: {{kind: wordpiece, vocab: 300}}
tokens: {{overlap: 8}}
model: {{family: bert, size: tiny, shape: {{width: 32, dropout: {dropout}}}}}
train: {{layout: labelled, length: 24, batch: 16, steps: {steps}, learning_rate: 2e-2, optimizer: muon, warmup: 0.1,
        schedule: linear, evaluate_every: {half}, save_every: {half}, log_every: 1}}
engine: {{device: cpu}}
"""


def write_project(folder: Path, task: str, steps: int, dropout: float = 0.0) -> Path:
    """Files of 300 and 60 examples, and their config; return the config."""
    dice = random.Random(1)
    for name, count in (("train", 300), ("valid", 60)):
        path = folder / f"{name}.{ENDINGS[task]}"
        path.write_text(_TEXTS[task](dice, name, count), encoding="utf-8")
    config = folder / "labels.yaml"
    config.write_text(YAML.format(task=task, end=ENDINGS[task], steps=steps, half=steps // 2, dropout=dropout))
    return config


def _sentence(dice: random.Random, *more: str) -> list[str]:
    words = dice.sample(FILLERS, 5)
    for word in more:
        words.insert(dice.randrange(len(words) + 1), word)
    return words


def _csv(dice: random.Random, name: str, count: int) -> str:
    lines = ["text,label"]
    for number in range(count):
        kind = dice.randrange(2)
        word = dice.choice((BAD, GOOD)[kind])
        lines.append(f"{' '.join(_sentence(dice, word))} {number},{('neg', 'pos')[kind]}")
    return "\n".join(lines) + "\n"


def _conll(dice: random.Random, name: str, count: int) -> str:
    kinds = {**dict.fromkeys(NAMES, "B-PER"), **dict.fromkeys(CITIES, "B-LOC")}
    sentences = (_sentence(dice, dice.choice(NAMES), dice.choice(CITIES)) for _ in range(count))
    return "\n".join("".join(f"{word} {kinds.get(word, 'O')}\n" for word in words) for words in sentences)


def _squad(dice: random.Random, name: str, count: int) -> str:
    paragraphs = []
    for number in range(count):
        city = dice.choice(CITIES)
        context = " ".join(_sentence(dice, dice.choice(NAMES), city))
        answer = {"text": city, "answer_start": context.index(city)}
        question = {"id": f"{name}-{number}", "question": "where ?", "answers": [answer]}
        paragraphs.append({"context": context, "qas": [question]})
    return json.dumps({"version": "1.1", "data": [{"title": "cities", "paragraphs": paragraphs}]})


_TEXTS = {SEQUENCES: _csv, WORDS: _conll, ANSWERS: _squad}
