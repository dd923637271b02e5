"""The model card of a run: its figures are those that the run and `evaluate` recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.support.model_folders import TEXT
from textmill.cli import main

TRAIN = [
    "train.steps=4",
    "train.warmup=0",
    "train.batch=2",
    "train.length=16",
    "train.evaluate_every=2",
    "train.log_every=1",
    "train.save_every=2",
    "train.evaluate_batches=1",
]
MODEL = ["model.size=nano", "model.shape.layers=1", "model.shape.heads=2", "model.shape.width=16"]


@pytest.mark.long
def test_a_run_with_its_data_curve_and_scores(tmp_path: Path) -> None:
    (tmp_path / "mill.txt").write_text("\n\n".join(f"{number}. {text}" for number in range(60) for text in TEXT))
    (tmp_path / "my.yaml").write_text(
        "corpus: {sources: [mill.txt], documents: block, dedup: none, split: [80, 10, 10]}\ntokenizer: {vocab: 320}\n"
    )
    where = [str(tmp_path / "my.yaml"), f"folder={tmp_path / 'mine'}", "engine.device=cpu", "runner.workers=1"]
    for command in ("prepare", "fit-tokenizer", "tokenize"):
        assert main([command, *where]) == 0
    assert main(["train", *where, *TRAIN, *MODEL]) == 0
    run = str(tmp_path / "mine" / "run")
    assert main(["evaluate", run, "evaluate.tasks=perplexity", "--step", "4"]) == 0
    assert main(["export", run, f"export.folder={tmp_path / 'out'}", "export.license=mit", "--step", "4"]) == 0
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    head = yaml.safe_load(card.split("---")[1])
    assert head["license"] == "mit"
    assert head["pipeline_tag"] == "text-generation"
    rows = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", card, re.M))
    assert rows["sources"] == "mill.txt"
    tokens = json.loads((tmp_path / "mine" / "tokens" / "manifest.json").read_text())["splits"]["train"]
    assert rows["train split"].startswith(f"{tokens['documents']:,} documents, {tokens['tokens']:,} tokens")
    assert rows["steps"] == "4"
    assert rows["tokens seen"] == f"{4 * 2 * 16:,}"
    metrics = [json.loads(line) for line in (tmp_path / "mine" / "run" / "metrics.jsonl").read_text().splitlines()]
    valid = {row["step"]: row["valid_loss"] for row in metrics if "valid_loss" in row}
    losses = {row["step"]: row["loss"] for row in metrics if "loss" in row}
    for step in (2, 4):
        assert f"| {step} | {losses[step]:.4f} | {valid[step]:.4f} |" in card
    (measured,) = (tmp_path / "mine" / "run" / "evaluation").glob("step-0000004*.json")
    figures = json.loads(measured.read_text())
    assert "## Scores" in card
    assert "Protocol: " in card
    found = [
        value
        for part in figures.values()
        if isinstance(part, dict)
        for value in part.values()
        if isinstance(value, float)
    ]
    assert any(f"| {value:.6g} |" in card for value in found)
    assert str(tmp_path) not in card, "no folder of the machine"
