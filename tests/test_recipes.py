"""Every recipe runs, with two steps; quickstart.sh lists the whole life and runs too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from textmill.cli import main
from textmill.where import recipe_names, recipes_folder

QUICK = [
    "train.steps=2",
    "train.warmup=0",
    "train.batch=2",
    "train.length=32",
    "train.evaluate_batches=1",
    "sample.max_tokens=5",
    "sample.min_tokens=0",
]


def _write_pairs(path: Path) -> None:
    """A few questions and answers under the name and in the columns of songys/Chatbot_data."""
    pairs = [(f"{number}시에 뭐 해?", f"{number}시에는 물레방아를 돌려요.") for number in range(60)]
    path.write_text("Q,A,label\n" + "".join(f"{question},{answer},0\n" for question, answer in pairs), encoding="utf-8")


@pytest.mark.parametrize("name", recipe_names())
def test_recipe(name: str, tiny_texts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_texts.parent
    shutil.copy(recipes_folder() / f"{name}.yaml", folder)
    monkeypatch.chdir(folder)
    _write_pairs(folder / "ChatbotData.csv")
    assert main(["run", f"{name}.yaml", *QUICK]) == 0, capsys.readouterr().err
    assert f"All is done. The model is runs/{name}/run/step-0000002" in capsys.readouterr().out


def test_quickstart_sh(tmp_path: Path) -> None:
    script = tmp_path / "bin" / "textmill"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import sys; from textmill.cli import main; sys.exit(main())' \"$@\"\n")
    script.chmod(0o755)
    path = os.pathsep.join([str(script.parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(recipes_folder().parent)}
    done = subprocess.run(
        ["sh", str(recipes_folder() / "quickstart.sh"), *QUICK], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for wanted in ("whole", "bits/byte", "KING RICHARD:", "runs/quickstart/run/step-0000002", "Next:", "All is done"):
        assert wanted in done.stdout


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in recipe_names())
