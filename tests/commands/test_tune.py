"""The command tune: trials of a few steps, a kill between and during them, and the file that it writes."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from textmill.cli import main
from textmill.commands.tune import _tree
from textmill.config import RunConfig
from textmill.errors import Interrupted
from textmill.planning.tuning import Tuning
from textmill.tokens.splits import open_splits
from textmill.where import open_config, open_where

PROJECT = """\
folder: .
corpus: {sources: [words.txt], section_chars: 200, split: [80, 10, 10]}
tokenizer: {vocab: 300}
model: {shape: {layers: 1, heads: 1, width: 16, positions: 16}}
train: {length: 16, batch: 4, optimizer: muon, learning_rate: 0.001, weight_decay: 0.1, steps: 6}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("".join(f"the mill at river {number % 7} turns {number}\n" for number in range(600)))
    Path("textmill.yaml").write_text(PROJECT)
    return tmp_path


def test_a_killed_search_continues_where_it_was(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from textmill.planning import tuning

    real, calls = tuning.train, []
    # A trial takes 3.5 seconds of this clock, and loading what all use takes none: half a minute is 8 trials.
    clock = SimpleNamespace(monotonic=lambda: 3.5 * sum(config.train.steps != 1 for config in calls))
    monkeypatch.setattr(tuning, "time", clock)
    monkeypatch.setattr(import_module("textmill.commands.tune"), "time", clock)

    def train(config: Any, **more: Any) -> Path:
        calls.append(config)
        if len(calls) == 5:
            raise Interrupted("stopped")
        return real(config, **more)

    monkeypatch.setattr(tuning, "train", train)
    assert main(["tune", ".", "--minutes", "0.5"]) == 75
    trials = json.loads(Path("tune/trials.json").read_text())["trials"]
    assert len(trials) == 3  # the first call loads what all trials use, the fifth was interrupted
    assert not Path("tuned.yaml").exists()
    assert main(["tune", ".", "--minutes", "0.5"]) == 0
    after = json.loads(Path("tune/trials.json").read_text())
    assert after["trials"][:3] == trials
    assert len(after["trials"]) == 8
    assert len(calls) == len(after["trials"]) + 3  # two calls that load, and the interrupted one
    assert after["unit"] == "bits per byte"
    # A learning rate of 0.001 is far too low for six steps, so a higher one is kept.
    assert after["best"]["changes"]["train.learning_rate"] > 0.001
    tuned = open_where("tuned.yaml", []).config
    assert tuned.train.learning_rate == after["best"]["changes"]["train.learning_rate"]
    assert tuned.folder_of("train") == project / "run-tuned"
    assert tuned.corpus.sources == [str(project / "words.txt")]
    own = _tree(open_config(project, {"train.schedule": str(project / "mine.py")}))
    assert own["train"]["schedule"] == "mine.py", "relative to the file, so that a project can be moved"
    assert tuned.train.steps == 6
    assert not list(Path("tune").glob("trial-*/"))
    capsys.readouterr()
    # Other settings would make other trials: they are not mixed.
    assert main(["tune", ".", "train.batch=8"]) == 2
    assert "train.batch" in capsys.readouterr().err
    assert main(["tune", ".", "--minutes", "0.5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trials"] == after["trials"]
    # An earlier version may have searched in another order: a result counts for its own trial only.
    other = {**after["trials"][2], "setting": "train.label_smoothing", "changes": {"train.label_smoothing": 0.1}}
    Path("tune/trials.json").write_text(json.dumps({**after, "trials": [*trials[:2], other, *after["trials"][2:]]}))
    assert main(["tune", ".", "--minutes", "0.5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trials"] == after["trials"]


def test_trials_are_scaled_to_the_epochs_that_the_run_may_have(tokenized: Path) -> None:
    def steps(**train: float) -> int | None:
        tree = {"folder": str(tokenized), "train": {"length": 16, "batch": 4, **train}}
        config = RunConfig.model_validate(tree)
        return Tuning(config, open_splits(config), 1.0, 0.0)._full_steps()

    assert steps(steps=100_000, max_epochs=2) == steps(epochs=2)
    assert steps(steps=3, max_epochs=2) == 3


def test_minutes_must_be_above_zero(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", ".", "--minutes", "0"]) == 2
    assert "--minutes" in capsys.readouterr().err
    assert not Path("tune").exists()


def test_too_few_minutes_are_refused_with_a_number(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", ".", "--minutes", "0.001", "train.steps=1000000"]) == 2
    printed = capsys.readouterr().err
    assert re.search(r"--minutes: 0.001 minutes give trials of \d+ steps?, .*; give --minutes \d+ or more", printed)
    assert not Path("tune/trials.json").exists()  # more minutes choose longer trials
    assert not Path("tuned.yaml").exists()
