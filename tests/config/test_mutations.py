"""150 broken configs: each refused in one line that names the key and what to do, before anything is written."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from textmill.cli import main
from textmill.config.keys import all_fields, section_types
from textmill.config.other_names import OPTIONS, is_reason

DICE = random.Random(150)
LEAVES = [(key, field) for key, field in all_fields() if not section_types(field.annotation) and "." in key]
GOOD = {"corpus": {"sources": ["tinyshakespeare"]}, "model": {"size": "nano"}, "train": {"length": 64, "steps": 2}}

IMPOSSIBLE: list[tuple[str, Any]] = [
    ("model.size", "gigantic"),
    ("model.shape.heads", 5),
    ("model.shape.heads", 0),
    ("model.shape.width", 130),
    ("train.length", 100_000),
    ("train.length", 1),
    ("train.steps", 0),
    ("train.steps", -5),
    ("train.batch", 0),
    ("engine.micro_batch", 5),
    ("engine.micro_batch", 0),
    ("train.learning_rate", 0),
    ("train.learning_rate", -1.0),
    ("train.learning_rate", float("nan")),
    ("train.learning_rate", float("inf")),
    ("train.min_learning_rate", 1.0),
    ("train.warmup", 5000),
    ("train.warmup", -1),
    ("train.betas", [0.9]),
    ("train.betas", [0.9, 1.0]),
    ("train.clip", -1),
    ("train.weight_decay", -0.1),
    ("train.seed", -1),
    ("train.checkpoints.keep", 0),
    ("tokenizer.vocab", 10),
    ("corpus.split", "a,b"),
    ("corpus.split", [0, 1, 1]),
    ("corpus.split", [1, 2, 3, 4]),
    ("corpus.split", [90, -5, 5]),
    ("corpus.section_chars", 1),
    ("corpus.max_unreadable", 2),
    ("sample.temperature", -1),
    ("sample.top_p", 0),
    ("sample.top_p", 1.5),
    ("sample.top_k", -1),
    ("sample.max_tokens", 0),
    ("sample.min_tokens", 500),
    ("sample.repetition_penalty", 0),
    ("engine.device", "tpu"),
    ("engine.device", "cuda:x"),
    ("engine.precision", "fp4"),
    ("engine.kind", "tensorflow"),
    ("runner.workers", 0),
    ("runner.kind", "spark"),
    ("evaluate.tasks", ["glue"]),
    ("model.family", "mamba"),
    ("train.schedule", "cosin"),
    ("train.layout", "packd"),
    ("track.kinds", ["mlflow"]),
    ("model.shape.dropout", 1.0),
]


def typo(key: str) -> str:
    """The key with one letter of its last word swapped, dropped or doubled."""
    head, _, word = key.rpartition(".")
    others = [leaf.rpartition(".")[2] for leaf, _ in LEAVES if leaf.startswith(f"{head}.") and leaf != key]
    unclear = {other[:place] + other[place + 1 :] for other in others for place in range(len(other))}
    while True:
        place = DICE.randrange(1, len(word))
        wrong = DICE.choice(
            [
                word[:place] + word[place + 1 :],
                word[:place] + word[place] + word[place:],
                word[:place] + "x" + word[place:],
            ]
        )
        if wrong not in OPTIONS and wrong not in unclear | {leaf.rpartition(".")[2] for leaf, _ in LEAVES}:
            return f"{head}.{wrong}"


def wrong_value(field: Any) -> Any:
    """A value of a type that the field does not take."""
    return DICE.choice([{"a": 1}, [[1]], {"b": []}])


FOREIGN = sorted(
    word
    for word, target in OPTIONS.items()
    if target[0] != "@" and not is_reason(target) and word not in {leaf.rpartition(".")[2] for leaf, _ in LEAVES}
)
CASES: list[tuple[str, str, Any, str]] = (
    [("typo", typo(key), 1, key) for key, _ in DICE.sample(LEAVES, 50)]
    + [("type", key, wrong_value(field), key) for key, field in DICE.sample(LEAVES, 40)]
    + [("impossible", key, value, key.split(".")[-1]) for key, value in IMPOSSIBLE]
    + [("foreign", f"train.{word}", 1, OPTIONS[word].partition("=")[0]) for word in DICE.sample(FOREIGN, 12)]
)


def test_there_are_150_broken_configs() -> None:
    assert len(CASES) >= 150
    assert len(IMPOSSIBLE) == 50


@pytest.mark.parametrize(
    ("kind", "key", "value", "named"), CASES, ids=[f"{kind}-{key}-{i}" for i, (kind, key, _, _) in enumerate(CASES)]
)
def test_a_broken_config_is_refused_in_one_line(
    kind: str,
    key: str,
    value: Any,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tree: dict[str, Any] = {section: dict(keys) for section, keys in GOOD.items()}
    holder = tree
    for part in key.split(".")[:-1]:
        holder = holder.setdefault(part, {})
    holder[key.split(".")[-1]] = value
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(tree))
    monkeypatch.chdir(tmp_path)
    assert main(["run", "bad.yaml"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("textmill: bad.yaml:")
    assert named in printed.err
    assert ";" in printed.err, "what to do is after a semicolon"
    assert "Traceback" not in printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


def test_the_unbroken_config_is_accepted(tmp_path: Path) -> None:
    from textmill.where import open_where

    (tmp_path / "good.yaml").write_text(yaml.safe_dump(GOOD))
    assert open_where(str(tmp_path / "good.yaml"), []).config.train.length == 64
