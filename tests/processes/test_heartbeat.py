"""A rank that is dead, stopped or hung ends the job and is named; a fault on one rank damages no other."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bench.kill_ranks import rank_arguments, run_ranks
from textmill.processes.heartbeat import Heartbeat, any_progress, diagnose, find_collective
from textmill.training.divergence import find_mismatch, find_slowest


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    return Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("watch") / "root"))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_dead_or_hung_rank_ends_the_job_and_is_named(root: Path, kind: str) -> None:
    run = root / kind
    ending = run_ranks(
        rank_arguments(root, run, "engine.timeout=10"), ranks=2, fault=f"{kind}@step:5:1", waits_for=[0]
    )[0]
    assert ending.code == 75, ending.output
    assert ending.names(kind, 1), ending.output
    assert ending.ranks_with_stacks == {0}, ending.output
    assert "train_step" in ending.output, "the stack shows where it waited"
    assert "rank 1" in json.loads((run / "stopped.json").read_text())["why"]


@pytest.mark.long
def test_fault_on_one_rank_affects_no_other(root: Path) -> None:
    """All three ranks skip the update if one has a NaN gradient; a flipped bit is detected and its place reported."""
    run = root / "alone"
    arguments = rank_arguments(
        root, run, "train.batch=6", "train.save_every=1", "train.checkpoints.keep=20", "engine.timeout=300"
    )
    endings = run_ranks(arguments, ranks=3, fault="nan@step:2:1,flip@step:7:1", waits_for=[0, 1, 2])
    assert [endings[rank].code for rank in range(3)] == [2, 2, 2], endings[0].output
    assert "step 3: loss or gradient is not finite; skipped the update" in endings[0].output
    assert "step 3: not saved, because its loss is not finite" in endings[0].output
    assert not (run / "step-0000003").exists()
    assert _hash_of(run / "step-0000002") != _hash_of(run / "step-0000004"), "training continued"
    assert json.loads((run / "step-0000004" / "progress.json").read_text())["updates"] == 3
    reports = [ending.output for ending in endings.values() if "are no longer the same" in ending.output]
    assert len(reports) == 1, "only one rank reports"
    assert "step 8: the replicas of" in reports[0]
    assert not (run / "step-0000008").exists()
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    slowest = {one["step"]: one for one in metrics if "slowest_rank" in one}
    assert list(slowest) == [2, 3, 5, 6, 7, 8], "compared before each checkpoint, logged with the next step"
    assert all(one["slowest_rank"] in range(3) and one["slowest_rank_ratio"] >= 1 for one in slowest.values())
    assert "rank 1 differs from the other 2" in reports[0]


def _hash_of(folder: Path) -> str:
    return str(json.loads((folder / "manifest.json").read_text())["files"]["model.safetensors"]["sha256"])


BROKEN = """
import os, signal
from textmill.processes import heartbeat
heartbeat.BEAT_SECONDS = 0.2
class Store:
    writes = 0
    def set(self, key, value):
        self.writes += 1
        if self.writes > 1:
            os.kill(os.getpid(), signal.SIGTERM)
            raise TypeError("this store is broken")
heartbeat.Watchdog(0, 2, Store(), 60.0).end_job("a collective failed")
"""


def test_a_failing_watchdog_ends_the_process() -> None:
    """A launcher's SIGTERM during the diagnosis does not keep the watchdog from reporting."""
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=300)
    assert done.returncode == 75, done.stderr
    assert (
        "rank 0: in the start: a collective failed; the watchdog itself failed (TypeError: this store is broken)"
        in done.stderr
    )


def test_diagnosis() -> None:
    at, waits = "step 5", "all_reduce (x.py:1)"
    first: list[Heartbeat | None] = [Heartbeat(3, at, waits, 5), Heartbeat(9, at, waits, 5), Heartbeat(4, at, None, 5)]
    later: list[Heartbeat | None] = [Heartbeat(6, at, waits, 6), Heartbeat(9, at, waits, 5), Heartbeat(7, at, None, 6)]
    assert diagnose(first, later) == "no heartbeat (dead, stopped or cut off): rank 1 (last seen in step 5)"
    assert "rank 2 (never seen)" in diagnose([*first[:2], None], [*later[:2], None])
    later[1] = Heartbeat(12, at, waits, 6)
    assert diagnose(first, later) == "the other ranks wait for rank 2 (in step 5)"
    later[2] = Heartbeat(8, at, waits, 6)
    assert diagnose(first, later).startswith("deadlock: all ranks wait for one another")


def test_the_slowest_rank_is_named() -> None:
    assert find_slowest([5.0, 10.0, 9.0, 10.0]) == (0, 2.0)
    assert find_slowest([3.0, 2.0]) == (1, 1.5)


def test_any_progress() -> None:
    before: list[Heartbeat | None] = [Heartbeat(3, "step 5", None, 9), Heartbeat(4, "step 5", None, 1)]
    assert not any_progress(before, [Heartbeat(4, "step 5", None, 10), Heartbeat(4, "step 5", None, 1)], 5), (
        "one rank is silent, the other makes no progress"
    )
    assert any_progress(before, [Heartbeat(4, "step 5", None, 10), Heartbeat(5, "step 5", None, 2)], 5)
    assert not any_progress(before, [Heartbeat(4, "step 5", None, 10), Heartbeat(5, "step 5", None, 6)], 5)
    assert any_progress([None], [Heartbeat(1, "the start", None, 0)], 5)


@pytest.mark.long
def test_slow_disk_is_not_a_hang_but_a_hang_at_the_start_is(root: Path) -> None:
    """A rank writes for longer than the timeout while the other waits; then a rank never reaches its first step."""
    run, short = root / "slow", "import textmill.processes.heartbeat; textmill.processes.heartbeat.START_SECONDS = 20"
    arguments = rank_arguments(root, run, "train.steps=4", "train.warmup=0", "engine.timeout=4")
    slow = run_ranks(arguments, ranks=2, fault="slow@disk:1", waits_for=[0, 1])
    assert [slow[rank].code for rank in range(2)] == [0, 0], slow[0].output
    assert json.loads((run / "step-0000004" / "progress.json").read_text())["step"] == 4
    hung = run_ranks(
        rank_arguments(root, root / "hung", "engine.timeout=10"),
        ranks=2,
        fault="hang@start:1",
        waits_for=[0, 1],
        before=short,
    )
    assert [hung[rank].code for rank in range(2)] == [75, 75], hung[0].output
    assert hung[0].names("hang", 1), hung[0].output
    assert "in the start, waiting in all_gather" in hung[0].output
    assert "rank 1" in json.loads((root / "hung" / "stopped.json").read_text())["why"]


def test_the_collective_is_read_from_the_stack() -> None:
    gate, end = threading.Event(), threading.Lock()
    thread = threading.Thread(target=lambda: gate.wait(), daemon=True)
    busy = threading.Thread(target=lambda: end.acquire(), daemon=True)
    with end:
        thread.start()
        busy.start()
        found = find_collective(thread)
        assert find_collective(busy) is None
    gate.set()
    thread.join()
    busy.join()
    assert found is not None
    assert "gate.wait()" in found
    assert "test_heartbeat.py" in found


def test_the_deviating_replica_is_named() -> None:
    assert find_mismatch([{"a": 1, "b": 2}, {"a": 1, "b": 2}]) is None
    assert find_mismatch([{}, {}]) is None
    assert find_mismatch([{"a": 1}, {"b": 2}]) is None, "shards that only one rank has have no replica"
    alone = find_mismatch([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 2}])
    assert alone is not None
    assert "'b'" in alone
    assert "rank 1 differs from the other 2" in alone
    two = find_mismatch([{"a": 1}, {"a": 2}])
    assert two is not None
    assert "rank 0 and 1 differ, without a majority" in two


@pytest.mark.long
def test_unexpected_error_on_one_rank_ends_all(root: Path) -> None:
    broken = (
        "import os, textmill.training.loop as setup\n"
        "if os.environ['RANK'] == '1': setup.open_splits = lambda _: open('/nowhere/at/all')"
    )
    endings = run_ranks(
        rank_arguments(root, root / "broken", "engine.timeout=300"), ranks=2, fault="", waits_for=[0, 1], before=broken
    )
    assert [endings[rank].code for rank in range(2)] == [1, 1], endings[0].output
    assert "FileNotFoundError" in endings[1].output
    assert "this was rank 1 of 2; it ends the other ranks too" in endings[1].output
    assert endings[0].output == "", "only one rank reports"
