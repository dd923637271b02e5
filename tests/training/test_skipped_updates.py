"""Skipped updates are reported, remembered over a resume, and too many in a row end the run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.kill_train import read_metrics
from tests.support.small_runs import config_for
from textmill.errors import TextmillError
from textmill.storage import faults
from textmill.training.loop import train

GUARDED = ("train.spike_threshold=4", "train.checkpoints.keep=9", "train.evaluate_batches=1", "train.log_every=4")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    return Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("patience") / "root"))


@pytest.fixture(autouse=True)
def disarmed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("textmill.engines.spikes.WINDOW", 8)
    yield
    faults.arm("")


def test_spikes_are_reported_remembered_and_end_the_run(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(root, root / "spiky", 24, *GUARDED)
    faults.arm("spike@step:17,spike@step:18")
    train(config)
    assert (
        "step 20: loss spike: skipped 2 updates, the last in step 19; its loss was more than 4 deviations above"
        in capsys.readouterr().out
    )
    first = read_metrics(root / "spiky")
    assert [line["spikes"] for line in first if "loss" in line][-3:] == [0, 2, 2]
    progress = json.loads((root / "spiky" / "step-0000024" / "progress.json").read_text())
    assert progress["updates"] == 22
    assert {name: progress["spikes"][name] for name in ("left", "streak", "last")} == {
        "left": 2,
        "streak": 0,
        "last": 19,
    }
    train(config, step=15)
    assert read_metrics(root / "spiky") == first
    assert json.loads((root / "spiky" / "step-0000024" / "progress.json").read_text()) == progress
    monkeypatch.setattr("textmill.training.divergence.MAX_SPIKES", 5)
    faults.arm(",".join(f"spike@step:{step}" for step in range(17, 24)))
    with pytest.raises(TextmillError, match=r"step 24: loss spikes: the last 7 updates were skipped; .* with --step"):
        train(config, step=15)


@pytest.mark.parametrize("engine", ["jax", "deepspeed"])
def test_faults_of_the_torch_engine_are_refused_by_others(root: Path, engine: str) -> None:
    pytest.importorskip(engine, reason=f"needs the extra {engine}")
    faults.arm("nan@step:3")
    with pytest.raises(TextmillError, match=r"TEXTMILL_FAULT: only the torch engine supports nan"):
        train(config_for(root, root / engine, 6, f"engine.kind={engine}"))
