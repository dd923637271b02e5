"""Divergence checks: report skipped optimizer updates, and end the run when too many are skipped in a row."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from textmill.errors import AlreadyReported, TextmillError
from textmill.track import Trackers

MAX_BAD_LOGS = 5
"""The run ends after this many logged steps in a row without a finite loss."""
MAX_SPIKES = 20
"""The run ends after this many updates in a row were skipped because of a loss spike."""


class Step(Protocol):
    """The part of a step's result that is needed here."""

    @property
    def skipped(self) -> bool: ...
    @property
    def scale(self) -> float | None: ...


class SpikeCounts(Protocol):
    """The part of an engine's spike guard that is needed here."""

    deviations: float

    def counts(self) -> dict[str, int]: ...


class SkippedUpdates:
    """Checks each logged step for a skipped update. All ranks see the same numbers; only rank 0 reports."""

    def __init__(self, run: Path, guard: SpikeCounts | None, first: bool) -> None:
        self.run, self.guard, self.first = run, guard, first
        self._bad_logs, self._spikes_reported = 0, guard.counts()["left"] if guard else 0

    def metrics(self, result: Step) -> dict[str, float]:
        """Values to log: the loss scale of fp16, and the number of updates skipped because of spikes so far."""
        scale = {} if result.scale is None else {"loss_scale": result.scale}
        return scale | ({"spikes": self.guard.counts()["left"]} if self.guard else {})

    def check(self, done: int, result: Step, trackers: Trackers) -> None:
        """Report updates skipped up to this step; raise when the run has diverged."""
        at_scale = "" if result.scale is None else f" at a loss scale of {result.scale:,.0f}"
        spikes = self._report_spikes(done, trackers)
        skipped = result.skipped and spikes.get("last") != done  # some engines skip a spike by a gradient of NaN
        # A loss scale above 1 is halved until the gradients fit in fp16. At 1 or below, only the user can help.
        self._bad_logs = self._bad_logs + 1 if skipped and (result.scale or 1.0) <= 1.0 else 0
        if skipped:
            trackers.note(f"step {done}: loss or gradient is not finite{at_scale}; skipped the update")
        if spikes and spikes["streak"] >= MAX_SPIKES:
            self._end(
                f"step {done}: loss spikes: the last {spikes['streak']} updates were skipped; check the data at this "
                "step, or resume from an earlier checkpoint with --step and a higher train.spikes.threshold or a lower "
                "train.learning_rate"
            )
        if self._bad_logs >= MAX_BAD_LOGS:
            advice = "lower train.learning_rate or set engine.precision=fp32, and start from scratch with --force"
            self._end(f"diverged: the loss is no longer finite at step {done}{at_scale}; {advice}")

    def _report_spikes(self, done: int, trackers: Trackers) -> dict[str, int]:
        if self.guard is None:
            return {}
        counts = self.guard.counts()
        if new := counts["left"] - self._spikes_reported:
            updates = "1 update" if new == 1 else f"{new} updates"
            reason = f"its loss was more than {self.guard.deviations:g} deviations above the median"
            trackers.note(f"step {done}: loss spike: skipped {updates}, the last in step {counts['last']}; {reason}")
        self._spikes_reported = counts["left"]
        return counts

    def _end(self, reason: str) -> None:
        error = TextmillError(f"{self.run}: {reason}")
        raise error if self.first else AlreadyReported(error.exit_code)
