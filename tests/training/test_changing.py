"""`train --change`: other settings from a checkpoint on, resumed bitwise, visible in the curve."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from textmill.checkpoints.folders import list_checkpoints, open_checkpoint
from textmill.cli import main
from textmill.config import RunConfig
from textmill.config.load import build_config
from textmill.corpus.prepare import prepare
from textmill.errors import TextmillError
from textmill.storage import faults
from textmill.tokens.tokenize import tokenize
from textmill.training.loop import train


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and two folders of tokens."""
    root = tmp_path_factory.mktemp("tokens")
    for name in ("first", "second"):
        texts = [f"The {name} mill number {n * 7919 % 1000} stands by river {n % 13}." for n in range(60)]
        (root / f"{name}.txt").write_text("\n\n".join(texts), encoding="utf-8")
        use = {"use": str(root / "first" / "tokenizer")} if name == "second" else {"vocab": 290}
        tree: dict[str, Any] = {
            "folder": str(root / name),
            "corpus": {"sources": [str(root / f"{name}.txt")], "documents": "block"},
            "tokenizer": use,
            "runner": {"workers": 1},
        }
        prepare(build_config(tree))
        tokenize(build_config(tree))
    return root


def config_of(root: Path, run: Path, weights: tuple[float, ...] = (3, 1), **train_settings: Any) -> RunConfig:
    used = [
        {"path": str(root / name / "tokens"), "weight": weight}
        for name, weight in zip(("first", "second"), weights, strict=False)
    ]
    return build_config(
        {
            "folder": str(root / "first"),
            "tokens": {"use": used},
            "model": {"shape": {"layers": 1, "heads": 1, "width": 8, "positions": 16, "dropout": 0.1}},
            "engine": {"device": "cpu"},
            "train": {
                "folder": str(run),
                "steps": 8,
                "batch": 4,
                "warmup": 2,
                "learning_rate": 1e-3,
                "log_every": 1,
                "save_every": 2,
                "evaluate_every": 4,
                "evaluate_batches": 2,
                **train_settings,
            },
        }
    )


CHANGED: dict[str, Any] = {
    "steps": 16,
    "learning_rate": 4e-4,
    "min_learning_rate": 1e-5,
    "batch": 6,
    "weight_decay": 0.3,
}


def metrics_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def state_of(run: Path) -> list[bytes]:
    return [(run / "step-0000016" / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]


def test_a_changed_run_resumes_bitwise(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for run in (whole, killed):
        train(config_of(tokens, run))
        with pytest.raises(
            TextmillError, match=r"train\.batch was 4, is 6; .*step 8 on with textmill train WHERE --change"
        ):
            train(config_of(tokens, run, (1, 2), **CHANGED))
    train(config_of(tokens, whole, (1, 2), **CHANGED), change=True)

    for first_step_of_death in (9, 13):  # before the change is in a checkpoint, and after

        def die(step: int | str, at: int = first_step_of_death) -> None:
            if step == at:
                raise RuntimeError("killed")

        monkeypatch.setattr(faults, "break_process", die)
        with pytest.raises(RuntimeError, match="killed"):
            train(config_of(tokens, killed, (1, 2), **CHANGED), change=True)
    monkeypatch.undo()
    train(config_of(tokens, killed, (1, 2), **CHANGED))  # the change is saved: --change is not needed any more
    assert metrics_of(killed) == metrics_of(whole)
    assert state_of(killed) == state_of(whole)
    lines = metrics_of(whole)
    assert [line["batch"] for line in lines if "batch" in line] == [6] * 8
    marks = [line for line in lines if "change" in line]
    assert len(marks) == 1
    assert marks[0]["step"] == 8
    assert "train.learning_rate was 0.001, is 0.0004" in marks[0]["change"]
    assert "tokens.use (the blend) was 3 x " in marks[0]["change"]
    progress = json.loads((killed / "step-0000016" / "progress.json").read_text(encoding="utf-8"))
    assert [one["step"] for one in progress["ranges"]] == [0, 8]
    assert [one["settings"]["train.batch"] for one in progress["ranges"]] == [4, 6]
    assert progress["samples"] == 8 * 4 + 8 * 6
    capsys.readouterr()
    assert main(["show", str(killed)]) == 0
    assert f"changed after step 8: {marks[0]['change']}\n" in capsys.readouterr().out
    assert main(["show", str(killed), "--step", "3"]) == 0
    assert "step 3: 4 samples of 16 tokens" in capsys.readouterr().out


def test_rates_after_the_change_follow_the_formula(tokens: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config_of(tokens, run))
    train(config_of(tokens, run, **CHANGED), change=True)
    rates = {line["step"]: line["learning_rate"] for line in metrics_of(run) if "learning_rate" in line}

    def cosine(step: int, high: float, low: float, steps: int) -> float:
        return low + (high - low) * (1 + math.cos(math.pi * (step - 1 - 2) / (steps - 2))) / 2

    for step in range(3, 9):
        assert rates[step] == pytest.approx(cosine(step, 1e-3, 0.0, 8), rel=1e-12)
    for step in range(9, 17):
        assert rates[step] == pytest.approx(cosine(step, 4e-4, 1e-5, 16), rel=1e-12)


def test_what_cannot_change(tokens: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config_of(tokens, run, steps=2))
    with pytest.raises(TextmillError, match=r"--change: cannot change in mid-run: train\.seed was 1234, is 5; set"):
        train(config_of(tokens, run, steps=4, seed=5), change=True)
    with pytest.raises(TextmillError, match=r"train\.seed was 1234, is 5; set them back, choose another train\.folder"):
        train(config_of(tokens, run, steps=4, seed=5))
    with pytest.raises(TextmillError, match=r"is at its last step, 2; set a higher train\.steps"):
        train(config_of(tokens, run, steps=2, batch=2), change=True)
    with pytest.raises(TextmillError, match=r"last step, 2; set a higher train\.steps or train\.max_epochs to"):
        train(config_of(tokens, run, steps=2, batch=2, max_epochs=50), change=True)
    train(config_of(tokens, run, (1,), steps=4), change=True)  # one store less
    progress = json.loads((run / "step-0000004" / "progress.json").read_text(encoding="utf-8"))
    assert [len(one["settings"]["tokens"]) for one in progress["ranges"]] == [2, 1]
    without = config_of(tokens, run, (1,), steps=6)
    shape = {**without.model.shape.model_dump(), "dropout": 0.0}  # type: ignore[union-attr]
    without = build_config({**without.model_dump(), "model": {"shape": shape}})
    train(without, change=True)
    assert json.loads((run / "step-0000006" / "config.json").read_text(encoding="utf-8"))["resid_pdrop"] == 0
    assert main(["train", str(run), "--change", "--force"]) == 2


def test_a_given_run_is_its_best_checkpoint(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given, run = tmp_path / "given", tmp_path / "run"
    often: dict[str, Any] = {"save_every": 1, "evaluate_every": 1, "checkpoints": {"keep": 9}, "warmup": 0}
    train(config_of(tokens, given, steps=3, **often))
    train(config_of(tokens, given, steps=4, learning_rate=9.0, schedule="constant", **often), change=True)
    losses = {
        step: float.fromhex(json.loads((folder / "progress.json").read_text(encoding="utf-8"))["valid_loss"])
        for step, folder in list_checkpoints(given).items()
    }
    best = min(losses, key=losses.__getitem__)
    assert best != 4, "the learning rate is so high that the loss rises"
    capsys.readouterr()
    tree = config_of(tokens, run, steps=1, learning_rate=1e-30, weight_decay=0.0, **often).model_dump(mode="json")
    tree["model"] = {"init_from": str(given)}
    train(build_config(tree))
    assert f"model.init_from: using {given / f'step-{best:07d}'}, valid loss" in capsys.readouterr().err
    before, after = (
        load_file(given / f"step-{best:07d}" / "model.safetensors"),
        load_file(run / "step-0000001" / "model.safetensors"),
    )
    assert all(np.array_equal(before[name], after[name]) for name in before)
    # The given run may be trained further and get another best checkpoint: the run still resumes.
    newest = open_checkpoint(given / "step-0000004")
    monkeypatch.setattr("textmill.training.start.open_model", lambda name: newest)
    tree["train"]["steps"] = 2
    assert list(list_checkpoints(train(build_config(tree)))) == [1, 2]
