"""Interrupt a save at every write, fsync, rename and removal, by SIGKILL or a full disk; check what remains.

python bench/kill_saves.py [kilobytes]
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from textmill.checkpoints.folders import (
    BEST_LINK,
    STEP_NAME,
    Checkpoint,
    find_checkpoint,
    find_checkpoint_damage,
    list_checkpoints,
)
from textmill.checkpoints.writing import Snapshot, plan_files, prune, remove_leftovers, write_checkpoint
from textmill.storage import faults

RULES: dict[str, dict[str, int | None]] = {
    "the old checkpoint is removed": {"keep": 1, "keep_every": None},
    "its optimizer state is removed": {"keep": 1, "keep_every": 5},
}


def snapshot(step: int, kilobytes: int = 1) -> Snapshot:
    """Return a small checkpoint whose numbers all depend on its step."""
    values = np.random.default_rng(step).normal(size=(kilobytes * 64, 4)).astype(np.float32)
    progress = {"step": step, "updates": step, "valid_loss": (1 / step).hex()}
    files = {"config.json": b"{}", "run.yaml": b"step: %d\n" % step}
    weights, moments = [("w", values), ("b", values[0])], [("m/w", values * 2), ("v/w", values * 3)]
    file_plans = (
        plan_files("model", weights, values.nbytes)[0],
        plan_files("optimizer", moments, values.nbytes)[0],
    )  # two files of each
    return Snapshot(step, weights, moments, progress, files, file_plans)


def _save(run: Path, kilobytes: int, rule: dict[str, int | None]) -> None:
    write_checkpoint(run, snapshot(10, kilobytes))
    prune(run, keep=rule["keep"] or 1, keep_every=rule["keep_every"])


def killed_at(point: int, work: Callable[[], None]) -> bool:
    """Do the work in a process that is killed at its n-th disk access; return whether it was killed."""
    child = os.fork()
    if child == 0:
        faults.arm(f"kill@disk:{point}")
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    ended = os.waitstatus_to_exitcode(status)
    assert ended in (0, -signal.SIGKILL), ended
    return ended != 0


def full_at(point: int, work: Callable[[], None]) -> bool:
    """Do the work on a disk that is full from its n-th access on; return whether that raised an error."""
    faults.arm(f"full@disk:{point}")
    try:
        work()
    except OSError:
        return True
    finally:
        faults.arm("")
    return False


def check_run(run: Path, kilobytes: int) -> int:
    """Return the step of the checkpoint found; fail if it differs from what was saved, or if leftovers remain."""
    found, best = find_checkpoint(run), find_checkpoint(run, "best")
    assert found is not None, f"{run}: no checkpoint found"
    assert best is not None, f"{run}: no best checkpoint found"
    _assert_same(found, snapshot(found.step, kilobytes))
    remove_leftovers(run)
    assert all(STEP_NAME.match(path.name) or path.name == BEST_LINK for path in run.iterdir()), (
        f"{run}: leftovers remain"
    )
    assert not (run / BEST_LINK).is_symlink() or not find_checkpoint_damage((run / BEST_LINK).resolve()), (
        f"{run}: {BEST_LINK} is not a complete checkpoint"
    )
    assert not [fault for folder in list_checkpoints(run).values() for fault in find_checkpoint_damage(folder)]
    return found.step


def _assert_same(found: Checkpoint, expected: Snapshot) -> None:
    assert found.progress == expected.progress
    for now, before in ((found.weights(), expected.weights), (found.optimizer_state(), expected.optimizer_state)):
        for (name, values), (named, others) in zip(sorted(now), sorted(before), strict=True):
            assert name == named
            assert np.array_equal(values, others), f"{found.folder}: {name} is mixed"
    assert all((found.folder / name).read_bytes() == data for name, data in expected.files.items())


def interrupt_everywhere(
    folder: Path, interrupt: Callable[[int, Callable[[], None]], bool], rule: dict[str, int | None], kilobytes: int
) -> Counter[int]:
    """Interrupt a save at its first disk access, its second, and so on; count which step was found."""
    seen: Counter[int] = Counter()
    first = folder / f"{interrupt.__name__}-{rule['keep_every']}"
    write_checkpoint(first, snapshot(5, kilobytes))
    for point in itertools.count(1):
        run = folder / f"{first.name}-{point}"
        shutil.copytree(first, run)
        interrupted = interrupt(point, lambda run=run: _save(run, kilobytes, rule))  # type: ignore[misc]
        seen[check_run(run, kilobytes)] += 1
        _save(run, kilobytes, rule)
        assert check_run(run, kilobytes) == 10, f"{run}: it could not resume"
        shutil.rmtree(run)
        if not interrupted:
            return seen
    raise AssertionError


def main(kilobytes: int = 1) -> int:
    """Check every point of a save, with both faults and both rules for old checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        for interrupt, fault in ((killed_at, "SIGKILL"), (full_at, "disk full")):
            for name, rule in RULES.items():
                seen = interrupt_everywhere(Path(folder), interrupt, rule, kilobytes)
                print(
                    f"{fault} at {seen.total() - 1} points, {name}: the old checkpoint was found {seen[5]} times, "
                    f"the new one {seen[10]} times, 0 damaged states"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
