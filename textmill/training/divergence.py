"""Patience: updates that were left out are told, and too many of them end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from textmill.errors import AlreadyReported, TextmillError
from textmill.track import Trackers

MAX_BAD_LOGS = 5
"""Logged steps in a row without a finite loss before the run gives up."""
MAX_SPIKES = 20
"""Updates in a row left out for a loss far above its level before the run gives up."""


class Step(Protocol):
    """A step's result, as far as it is asked here."""

    @property
    def skipped(self) -> bool: ...
    @property
    def scale(self) -> float | None: ...


class SpikeCounts(Protocol):
    """An engine's guard, as far as it is asked here."""

    deviations: float

    def counts(self) -> dict[str, int]: ...


class SkippedUpdates:
    """Looks at each logged step; all processes see the same, and one speaks."""

    def __init__(self, run: Path, guard: SpikeCounts | None, first: bool) -> None:
        self.run, self.guard, self.first = run, guard, first
        self._bad_logs, self._left = 0, guard.counts()["left"] if guard else 0

    def numbers(self, result: Step) -> dict[str, float]:
        """What the metrics have besides: the loss scale, and updates left out for spikes so far."""
        scale = {} if result.scale is None else {"loss_scale": result.scale}
        return scale | ({"spikes": self.guard.counts()["left"]} if self.guard else {})

    def look(self, done: int, result: Step, trackers: Trackers) -> None:
        """Tell what was left out up to this step; raise when nothing else comes any more."""
        at = "" if result.scale is None else f" at a loss scale of {result.scale:,.0f}"
        spikes = self._spikes(done, trackers)
        skipped = result.skipped and spikes.get("last") != done  # an engine may make a spike's gradient not finite
        # A loss scale above 1 falls until the gradients fit; below that nothing helps by itself.
        self._bad_logs = self._bad_logs + 1 if skipped and (result.scale or 1.0) <= 1.0 else 0
        if skipped:
            trackers.note(f"step {done}: loss or gradient is not finite{at}; the update was left out")
        if spikes and spikes["streak"] >= MAX_SPIKES:
            advice = "look at the data there, or go back to a checkpoint with --step and raise train.spikes.threshold or lower train.learning_rate"
            self._end(
                f"step {done}: the last {spikes['streak']} updates were left out, their losses far above those before; {advice}"
            )
        if self._bad_logs >= MAX_BAD_LOGS:
            advice = "lower train.learning_rate or set engine.precision=fp32, and start anew with --force"
            self._end(f"no finite loss any more at step {done}{at}; {advice}")

    def _spikes(self, done: int, trackers: Trackers) -> dict[str, int]:
        if self.guard is None:
            return {}
        counts = self.guard.counts()
        if new := counts["left"] - self._left:
            many = "an update was" if new == 1 else f"{new} updates were"
            why = f"the loss was more than {self.guard.deviations:g} deviations above its level"
            trackers.note(f"step {done}: {many} left out, the last in step {counts['last']}: {why}")
        self._left = counts["left"]
        return counts

    def _end(self, why: str) -> None:
        fault = TextmillError(f"{self.run}: {why}")
        raise fault if self.first else AlreadyReported(fault.exit_code)
