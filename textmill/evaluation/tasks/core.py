"""CORE: the mean of 22 tasks, each with its chance subtracted, as nanochat measures base models (DCLM, 2024)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textmill.config import EvaluateConfig
from textmill.config.load import read_yaml
from textmill.errors import TextmillError
from textmill.evaluation.choices import check_lengths
from textmill.evaluation.data_files import SAMPLE_SEED, Record, read_items
from textmill.evaluation.task import ItemLog, Measured, Pair, Score, Scorer, TaskEntry
from textmill.ranges import count_common
from textmill.storage.files import hash_file, hash_json

FILES = "the folder eval_bundle with core.yaml, eval_meta_data.csv and eval_data"
SOURCE = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip, which nanochat downloads"
ORDER_SEED = 1337
"""The seed of the order of a task's questions, which decides their examples."""


@dataclass(frozen=True)
class Part:
    """One of the tasks."""

    label: str
    kind: str
    """multiple_choice: one query, several choices; schema: several contexts, one continuation; language_modeling: one
    continuation, which must be the likeliest."""
    file: Path
    shots: int
    delimiter: str
    chance: float


def measure(scorer: Scorer, settings: EvaluateConfig, entry: TaskEntry) -> Measured:
    """The accuracy of each task, less its chance and divided by the rest, and the mean of these: `core`."""
    if entry.file is None or not (entry.file / "core.yaml").is_file():
        raise TextmillError(f"{entry.file}: has no core.yaml; core needs {FILES}; write core:FOLDER")
    if settings.shots is not None:
        raise TextmillError("evaluate.shots: the tasks of core have their own number of examples; remove it")
    parts = list(_read_parts(entry.file))
    logs: list[ItemLog] = []
    metrics: dict[str, float | None] = {"core": 0.0}
    for part in parts:
        part_logs = _measure_part(scorer, part, settings.sample)
        accuracy = sum(log["accuracy"] for log in part_logs) / len(part_logs)
        metrics[f"accuracy/{part.label}"] = accuracy
        metrics[f"centered/{part.label}"] = (accuracy - part.chance) / (1 - part.chance)
        logs += part_logs
    centered = [value or 0.0 for name, value in metrics.items() if name.startswith("centered/")]
    metrics["core"] = sum(centered) / len(centered)
    card = {
        "file": str(entry.file),
        "sha256": hash_json({part.label: hash_file(part.file) for part in parts}),
        "protocol": "CORE as in nanochat: mean loss of the tokens that differ; examples drawn from the same file",
        "tasks": len(parts),
        "examples": len(logs),
        **({"sample": settings.sample} if settings.sample else {}),
        "seed": ORDER_SEED,
    }
    return Measured(metrics, card, items=logs)


def _read_parts(folder: Path) -> Iterator[Part]:
    tasks = read_yaml(folder / "core.yaml")[0].get("icl_tasks") or []
    chances = {row["Eval Task"]: float(row["Random baseline"]) for _, row in read_items(folder / "eval_meta_data.csv")}
    for task in tasks:
        label = task["label"]
        file = folder / "eval_data" / task["dataset_uri"]
        if label not in chances or not file.is_file():
            raise TextmillError(
                f"{folder}: core.yaml names {label}, which has no chance in eval_meta_data.csv or no file"
            )
        shots = int(task["num_fewshot"][0])
        delimiter = task.get("continuation_delimiter", " ")
        yield Part(label, task["icl_task_type"], file, shots, delimiter, 0.01 * chances[label])


def _measure_part(scorer: Scorer, part: Part, sample: int | None) -> list[ItemLog]:
    """Score the questions of one task; all candidates are scored at once."""
    records = list(read_items(part.file))
    random.Random(ORDER_SEED).shuffle(records)
    questions = records[:sample]
    if len(questions) <= part.shots:
        raise TextmillError(
            f"{part.file}: {len(questions):,} questions are measured, and {part.label} shows {part.shots} others with "
            "each; raise evaluate.sample"
        )
    pairs: list[Pair] = []
    places: list[str] = []
    bounds: list[int] = []
    for number, (place, record) in enumerate(questions):
        drawn = random.Random(SAMPLE_SEED + number).sample(range(len(questions) - 1), part.shots)
        examples = [questions[other + (other >= number)][1] for other in drawn]  # all but the question itself
        item_pairs = _encode(scorer, part, record, examples)
        pairs += item_pairs
        places += [place] * len(item_pairs)
        bounds.append(len(pairs))
    check_lengths(pairs, places, scorer)
    scores = scorer.score_tokens(pairs)
    logs = []
    for (place, record), begin, end in zip(questions, [0, *bounds], bounds, strict=False):
        logs.append({"id": f"{part.label}:{Path(place).name}", **_grade(part, record, scores[begin:end])})
    return logs


def _grade(part: Part, record: Record, scores: Sequence[Score]) -> dict[str, Any]:
    if part.kind == "language_modeling":
        return {"accuracy": float(scores[0].greedy)}
    losses = [-score.log_likelihood / score.tokens for score in scores]
    prediction = losses.index(min(losses))
    return {"scores": losses, "prediction": prediction, "accuracy": float(prediction == record["gold"])}


def _encode(scorer: Scorer, part: Part, record: Record, examples: Sequence[Record]) -> list[Pair]:
    """The candidates as contexts and continuations: what all have in common at the start is the context, in a schema
    what they have in common at the end is the continuation."""
    shown = "".join(f"{_solved(part, example)}\n\n" for example in examples)
    prompts = [shown + text for text in _candidates(part, record)]
    first = [scorer.tokenizer.first_id]
    ids = [[*first, *text.tolist()] for text in scorer.tokenizer.encode_many(prompts)]
    if part.kind == "language_modeling":
        without = f"{shown}{record['context'].strip()}{part.delimiter}".strip()
        start = 1 + len(scorer.tokenizer.encode(without))
        return [(ids[0][:start], ids[0][start:])]
    if part.kind == "schema":
        common = min(count_common(ids[0][::-1], one[::-1]) for one in ids)
        return [(one[: len(one) - common], one[len(one) - common :]) for one in ids]
    # A candidate that others begin with keeps a token.
    common = min(min(count_common(ids[0], one), len(one) - 1) for one in ids)
    return [(one[:common], one[common:]) for one in ids]


def _candidates(part: Part, record: Record) -> list[str]:
    if part.kind == "multiple_choice":
        return [f"{record['query']}{part.delimiter}{choice}" for choice in record["choices"]]
    if part.kind == "schema":
        return [f"{context}{part.delimiter}{record['continuation']}" for context in record["context_options"]]
    return [f"{record['context'].strip()}{part.delimiter}{record['continuation']}"]


def _solved(part: Part, record: Record) -> str:
    """A question with its right answer, as an example."""
    return _candidates(part, record)[0 if part.kind == "language_modeling" else record["gold"]]
