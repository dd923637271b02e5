"""Examples in prompts (few-shot), drawn as lm-evaluation-harness draws them.

`evaluate.shots` examples stand before each question. They come from the published file next to the data, such as
train.jsonl, or else from the measured file itself, without the question itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textmill.config import EvaluateConfig
from textmill.errors import TextmillError
from textmill.evaluation.data_files import Record
from textmill.storage.files import hash_file

SHOTS_SEED = 1234
"""The seed with which lm-evaluation-harness draws examples."""

FindExamples = Callable[[Path], Path]
"""From a file of questions to the file of examples that is published with it."""
Placed = tuple[str, Record]
"""A record with its place."""
ReadRecords = Callable[[Path], Iterator[Placed]]


@dataclass(frozen=True)
class Examples:
    """Where the examples of a task's prompts come from, as in lm-eval."""

    find: FindExamples | None = None
    validation: bool = False
    """True if lm-eval measures the validation split; then it draws one example more, to leave out the question."""
    first: bool = False
    """Whether the prompt has the first examples of their file; else they are drawn at random for every question."""
    count: int = 0
    """How many, unless `evaluate.shots` says so."""


@dataclass(frozen=True)
class Shots:
    """The examples of every record of a file, and what the protocol card says about them."""

    by_record: list[Sequence[Placed]]
    card: dict[str, Any]


def named(new: str, *old: str) -> FindExamples:
    """The file in the same folder with another part of its name: `named("train", "dev", "val")`."""

    def find(path: Path) -> Path:
        for part in old:
            path = path.with_name(path.name.replace(part, new))
        return path

    return find


def choose_examples(
    path: Path, records: Sequence[Placed], read: ReadRecords, examples: Examples, settings: EvaluateConfig
) -> Shots:
    """The examples for each record of a file, which `read` has read."""
    count = examples.count if settings.shots is None else settings.shots
    if not count:
        return Shots([()] * len(records), {"shots": 0})
    found = examples.find(path) if examples.find else path
    file = found if found != path and found.is_file() else None
    pool = list(read(file)) if file else records
    spare = file is None or examples.validation
    if len(pool) < count + spare:
        raise TextmillError(
            f"{file or path}: has {len(pool):,} examples; evaluate.shots={count} needs at least {count + spare:,}; "
            "lower it"
        )
    card: dict[str, Any] = {"shots": count}
    card["shots_from"] = file.name if file else "the measured file, without the question"
    if file is not None:
        card["shots_sha256"] = hash_file(file)
    if examples.first:
        return Shots([_first(pool, record, count, file is None) for record in records], card)
    dice = random.Random(SHOTS_SEED)
    card["shots_seed"] = SHOTS_SEED
    return Shots([_draw(dice, pool, record, count, spare) for record in records], card)


def _first(pool: Sequence[Placed], question: Placed, count: int, is_same_file: bool) -> Sequence[Placed]:
    others = [one for one in pool[: count + 1] if one[1] != question[1]] if is_same_file else pool
    return others[:count]


def _draw(dice: random.Random, pool: Sequence[Placed], question: Placed, count: int, spare: bool) -> Sequence[Placed]:
    """As lm-eval's ContextSampler: with `spare`, one more is drawn and the question itself left out; should it occur
    twice, they are drawn again from all others."""
    drawn = dice.sample(pool, count + spare)
    others = [one for one in drawn if not spare or one[1] != question[1]][:count]
    if len(others) < count:
        others = dice.sample([one for one in pool if one[1] != question[1]], count)
    return others
