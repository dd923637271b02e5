"""Divergence checks: report skipped optimizer updates, end the run when too many are skipped in a row, and when the
replicas of a weight differ between ranks; report a rank whose device is slow.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from pathlib import Path
from typing import Any

from textmill.checkpoints.best import VALID_LOSS
from textmill.checkpoints.folders import list_checkpoints
from textmill.engines import Engine, Step
from textmill.errors import EXIT_USER, AlreadyReported, TextmillError
from textmill.track import Trackers

MAX_BAD_STEPS = 5
"""The run ends after this many steps in a row without a finite loss."""
COUNT_DELAY = 8
"""A step is counted this many steps later, so that counting does not wait for the device; on all ranks alike."""
SLOW_RATIO = 1.5
"""A rank that is so many times slower than the others is reported."""
MATMUL_SECONDS = 0.2
"""How long matmuls are timed for it."""


class SkippedUpdates:
    """Checks each logged step for a skipped update. All ranks see the same numbers; only rank 0 reports."""

    def __init__(self, run: Path, first: bool, precision: str) -> None:
        """`first` is whether this is rank 0; `precision` is that of the matmuls."""
        self.run = run
        self.full_precision = precision in ("float32", "fp32")
        self.first = first
        self._bad_steps = 0
        """Steps in a row whose loss or gradient was not finite."""
        self._uncounted: deque[tuple[int, Step]] = deque()
        """Steps that are not counted yet, oldest first, with their number."""

    def add(self, done: int, result: Step) -> None:
        """Count a step; raise when the run has diverged."""
        self._uncounted.append((done, result))
        self._count_until(done - COUNT_DELAY)

    def _count_until(self, last: int) -> None:
        while self._uncounted and self._uncounted[0][0] <= last:
            done, result = self._uncounted.popleft()
            # A loss scale above 1 is halved until the gradients fit in fp16. At 1 or below, only the user can help.
            bad = result.skipped and (result.scale or 1.0) <= 1.0
            self._bad_steps = self._bad_steps + 1 if bad else 0
            if self._bad_steps >= MAX_BAD_STEPS:
                self._end_diverged(done, result.scale)

    def refuses_save(
        self, done: int, loss: float, metrics: dict[str, float], *, last: bool, trackers: Trackers
    ) -> bool:
        """Whether this step must not replace a good checkpoint, because its loss is not finite; an error if it is the
        last step."""
        self._count_until(done)  # a save waits for the step anyway, and must not follow a divergence
        if math.isfinite(loss) and math.isfinite(metrics.get(VALID_LOSS, 0.0)):
            return False
        if last:
            self._end_diverged(done, None)
        trackers.note(f"step {done}: not saved, because its loss is not finite; earlier checkpoints stay")
        return True

    def check(self, done: int, result: Step, trackers: Trackers) -> None:
        """Report an update that this step skipped; raise when the run has diverged."""
        if result.skipped:
            trackers.note(f"step {done}: loss or gradient is not finite{_at_scale(result.scale)}; skipped the update")
        self._count_until(done)

    def _end_diverged(self, done: int, scale: float | None) -> None:
        saved = ", ".join(map(str, list_checkpoints(self.run)))
        kept = f" (kept checkpoints: {saved})" if saved else ""
        precision = "" if self.full_precision else " or set engine.precision=fp32"
        error = TextmillError(
            f"{self.run}: diverged: the loss is no longer finite at step {done}{_at_scale(scale)}; lower "
            f"train.learning_rate{precision}, and start from scratch with --force, or choose another train.folder{kept}"
        )
        raise error if self.first else AlreadyReported(error.exit_code)


def _at_scale(scale: float | None) -> str:
    return "" if scale is None else f" at a loss scale of {scale:,.0f}"


def compare_ranks(engine: Engine, step: int, trackers: Trackers) -> dict[str, float]:
    """Before a checkpoint: compare the weights that several ranks have, and the speed of all ranks; return the slowest
    rank, to be logged.

    The error about a weight names the deviating rank, so that no checkpoint has wrong weights. All ranks wait for the
    slowest one in each step.
    """
    ranks = engine.ranks
    if ranks.world == 1:
        return {}
    rank, ratio = find_slowest(ranks.all_gather(ranks.matmul_rate(MATMUL_SECONDS)))
    if ratio > SLOW_RATIO:
        trackers.note(
            f"step {step:,}: rank {rank} computes {ratio:.1f} times more slowly than the others, who wait; "
            "look for another program on its device, or for heat"
        )
    if mismatch := find_mismatch(ranks.all_gather(engine.replica_checksums())):
        advice = (
            "a GPU or its memory is faulty; replace it and run the command again, to resume from the checkpoint before"
        )
        raise TextmillError(f"step {step:,}: {mismatch}; {advice}") if ranks.first else AlreadyReported(EXIT_USER)
    return {"slowest_rank": rank, "slowest_rank_ratio": ratio}


def find_slowest(rates: list[float]) -> tuple[int, float]:
    """The slowest rank, and how many times as fast the median rank is; of two, the other one."""
    slowest = min(range(len(rates)), key=rates.__getitem__)
    return slowest, statistics.median_high(rates) / rates[slowest]


def find_mismatch(checksums: list[dict[str, Any]]) -> str | None:
    """The first weight whose replicas differ, and which rank deviates from the majority."""
    for name in sorted({name for one in checksums for name in one}):
        by_rank = {rank: one[name] for rank, one in enumerate(checksums) if name in one}
        (majority, count), *others = Counter(by_rank.values()).most_common()
        if others:
            deviating = [rank for rank, checksum in by_rank.items() if checksum != majority]
            which = f"rank {' and '.join(map(str, by_rank))} differ, without a majority"
            if count > others[0][1]:
                which = f"rank {', '.join(map(str, deviating))} differs from the other {count}"
            return f"the replicas of '{name}' are no longer the same: {which}"
    return None
