"""Cut a save short at every write, fsync, rename and removal in it, by death and by a full disk; look at what is found afterwards.

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

from textmill.checkpoints.file_plan import plan_files
from textmill.checkpoints.folders import (
    BEST_LINK,
    STEP_NAME,
    Checkpoint,
    Snapshot,
    find_checkpoint,
    find_checkpoint_damage,
    list_checkpoints,
    prune,
    remove_leftovers,
    write_checkpoint,
)
from textmill.storage import faults

RULES: dict[str, dict[str, int | None]] = {
    "the old one goes": {"keep": 1, "keep_every": None},
    "its optimizer goes": {"keep": 1, "keep_every": 5},
}


def snapshot(step: int, kilobytes: int = 1) -> Snapshot:
    """A small checkpoint whose every number depends on its step."""
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
    """Do the work in a process that dies at its n-th touch of the disk; whether it died."""
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
    """Do the work on a disk that is full from its n-th touch on; whether that was noticed."""
    faults.arm(f"full@disk:{point}")
    try:
        work()
    except OSError:
        return True
    finally:
        faults.arm("")
    return False


def found_in(run: Path, kilobytes: int) -> int:
    """The step of the checkpoint that is found; an error if it is not exactly what was saved, or if something half made stays."""
    found, best = find_checkpoint(run), find_checkpoint(run, "best")
    assert found is not None, f"{run}: nothing found"
    assert best is not None, f"{run}: the best one is not found"
    _assert_same(found, snapshot(found.step, kilobytes))
    remove_leftovers(run)
    assert all(STEP_NAME.match(path.name) or path.name == BEST_LINK for path in run.iterdir()), (
        f"{run}: something half made is left"
    )
    assert not (run / BEST_LINK).is_symlink() or not find_checkpoint_damage((run / BEST_LINK).resolve()), (
        f"{run}: {BEST_LINK} leads to nothing whole"
    )
    assert not [fault for folder in list_checkpoints(run).values() for fault in find_checkpoint_damage(folder)]
    return found.step


def _assert_same(found: Checkpoint, wanted: Snapshot) -> None:
    assert found.progress == wanted.progress
    for now, before in ((found.weights(), wanted.weights), (found.moments(), wanted.moments)):
        for (name, values), (named, others) in zip(sorted(now), sorted(before), strict=True):
            assert name == named
            assert np.array_equal(values, others), f"{found.folder}: {name} is mixed"
    assert all((found.folder / name).read_bytes() == data for name, data in wanted.files.items())


def walk(
    folder: Path, cut: Callable[[int, Callable[[], None]], bool], rule: dict[str, int | None], kilobytes: int
) -> Counter[int]:
    """Cut one save short at its first touch of the disk, its second, and so on to its end; how often which step was found."""
    seen: Counter[int] = Counter()
    first = folder / f"{cut.__name__}-{rule['keep_every']}"
    write_checkpoint(first, snapshot(5, kilobytes))
    for point in itertools.count(1):
        run = folder / f"{first.name}-{point}"
        shutil.copytree(first, run)
        was_cut = cut(point, lambda run=run: _save(run, kilobytes, rule))  # type: ignore[misc]
        seen[found_in(run, kilobytes)] += 1
        _save(run, kilobytes, rule)
        assert found_in(run, kilobytes) == 10, f"{run}: it could not go on"
        shutil.rmtree(run)
        if not was_cut:
            return seen
    raise AssertionError


def main(kilobytes: int = 1) -> int:
    """Every point of a save, both ways to cut it, both ways to prune."""
    with tempfile.TemporaryDirectory() as folder:
        for cut, said in ((killed_at, "SIGKILL"), (full_at, "disk full")):
            for name, rule in RULES.items():
                seen = walk(Path(folder), cut, rule, kilobytes)
                print(
                    f"{said} at {seen.total() - 1} points, {name}: the old one found {seen[5]} times, the new one {seen[10]}, 0 bad states"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
