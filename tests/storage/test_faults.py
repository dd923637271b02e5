"""Injected faults do what they are documented to do, and no save is ever found incomplete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from textmill.errors import TextmillError
from textmill.storage import faults
from textmill.storage.faults import Fault, parse

ROOT = Path(__file__).resolve().parents[2]


def test_a_save_killed_at_any_point_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    """In a separate process, since it forks; in /dev/shm if possible, since a killed process loses no page cache."""
    memory = Path("/dev/shm")
    folder = memory if os.access(memory, os.W_OK) else tmp_path
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "kill_saves.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = re.findall(
        r"(SIGKILL|disk full) at (\d+) points, .*: the old checkpoint was found (\d+) times, the new one (\d+)",
        done.stdout,
    )
    assert [what for what, *_ in results] == ["SIGKILL", "SIGKILL", "disk full", "disk full"]
    for _, *counts in results:
        points, old, new = map(int, counts)
        assert points > 25
        assert old > 20
        assert new >= 3


def test_fault_syntax() -> None:
    assert parse("") == []
    assert parse("kill@disk:7,nan@step:5:1,stop@step:2") == [
        Fault("kill", "disk", 7, 0),
        Fault("nan", "step", 5, 1),
        Fault("stop", "step", 2, 0),
    ]
    assert parse("hang@start:1,slow@disk:2,kill@start") == [
        Fault("hang", "start", 0, 1),
        Fault("slow", "disk", 2, 0),
        Fault("kill", "start", 0, 0),
    ]
    assert parse("nan@step:3") == [Fault("nan", "step", 3, 0)]
    for word in (
        "kill",
        "kill@disk",
        "nan@disk:1",
        "full@step:1",
        "kill@disk:1:2",
        "nan@start",
        "slow@step:1",
        "kill@step:x",
        "kill@step:1 ",
    ):
        with pytest.raises(TextmillError, match="kill@disk:7"):
            parse(word)


def test_only_the_named_rank_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.arm("nan@step:5:1")
    try:
        assert not faults.is_due("nan", 5), "a single process is rank 0"
        monkeypatch.setenv("RANK", "1")
        assert faults.is_due("nan", 5)
        assert not faults.is_due("nan", 4)
        assert not faults.is_due("flip", 5)
    finally:
        faults.arm("")
    assert not faults.is_due("nan", 5)
