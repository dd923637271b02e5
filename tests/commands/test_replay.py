"""A run repeated from its record is the same bit by bit, and the first difference is named."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from bench.kill_train import train_arguments
from tests.support.together import run_together
from textmill.cli import main

SCHEDULE = "def learning_rate(step, train):\n    return 3e-3 * (1 - step / train.steps)\n"
SAVES = ["train.save_every=3", "train.evaluate_every=3", "train.evaluate_batches=2"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    """A run that was stopped once and resumed."""
    root = Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("replay") / "root"))
    (root / "schedule.py").write_text(SCHEDULE)
    train = [*train_arguments(root, root / "run", 8), *SAVES, "train.warmup=0"]
    train.append(f"train.schedule={root / 'schedule.py'}")
    assert main(train) == 0
    shutil.rmtree(root / "run" / "step-0000008")
    assert main(train) == 0
    return root


def test_a_run_is_repeated(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the file of its own that it needs, which a record does not run."""
    assert main(["replay", str(root / "run")]) == 2
    assert "train.schedule was a file with SHA-256" in capsys.readouterr().err
    assert not (root / "run-replay" / "metrics.jsonl").exists()
    given = ["replay", str(root / "run"), f"train.schedule={root / 'schedule.py'}"]
    for _ in range(2):  # the second time from the finished copy
        assert main(given) == 0
        output = capsys.readouterr().out
        assert "the same, bit by bit: the metrics of 8 logged steps; weights and optimizer state of 2" in output


def test_the_first_difference_is_named(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(root / "run", tmp_path / "run", symlinks=True))
    given = ["replay", str(run), f"folder={root}", f"train.schedule={root / 'schedule.py'}"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    position, line = next((n, line) for n, line in enumerate(lines) if line["step"] == 5 and "loss" in line)
    wrong = line["loss"] * (1 + 2**-52)
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({**one, "loss": wrong} if n == position else one) + "\n" for n, one in enumerate(lines))
    )
    assert main([*given, "--out", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert f"the first difference is at step 5: loss was {wrong.hex()} ({wrong:.6g}), is {line['loss'].hex()}" in error

    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    manifest = run / "step-0000006" / "manifest.json"
    recorded = json.loads(manifest.read_text())
    recorded["files"]["model.safetensors"]["sha256"] = "0" * 64
    manifest.write_text(json.dumps(recorded))
    assert main([*given, "--out", str(tmp_path / "other")]) == 2
    assert "at step 6: SHA-256 of model.safetensors was 000000000000, is" in capsys.readouterr().err
    assert main([*given, "engine.micro_batch=2", "--out", str(tmp_path / "micro")]) == 2
    assert "; engine.micro_batch was auto, is 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.seed=9", "train.seed was 1234, is 9"),
        ("train.minutes=1", "replay: the length of the run is train.minutes"),
    ],
)
def test_what_cannot_be_repeated(
    root: Path, tmp_path: Path, setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["replay", str(root / "run"), f"train.schedule={root / 'schedule.py'}", setting]
    assert main([*given, "--out", str(tmp_path / "new")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new" / "metrics.jsonl").exists()


@pytest.mark.long
def test_two_processes(root: Path, tmp_path: Path) -> None:
    arguments = [*train_arguments(root, tmp_path / "run", 8), *SAVES, "engine.mesh.shard=2", "train.warmup=0"]
    assert run_together([sys.executable, "-m", "textmill", *arguments], 2) == "ok"
    assert run_together([sys.executable, "-m", "textmill", "replay", str(tmp_path / "run")], 2) == "ok"
    assert main(["replay", str(tmp_path / "run"), "engine.mesh.shard=1", "--out", str(tmp_path / "one")]) == 2
