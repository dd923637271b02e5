"""How many samples each step has: constant, or growing at the start of a run (Megatron's batch size ramp-up)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SizePhase:
    """Consecutive steps with the same batch size, up to the start of the next phase."""

    step: int
    """The first step."""
    sample: int
    """The first sample of that step."""
    size: int
    """Samples per step."""


class BatchSizes:
    """The batch size and the first sample of every step, as pure functions of the step."""

    def __init__(self, batch: int, ramp: Sequence[int] = ()) -> None:
        self.phases = _ramp_phases(batch, *ramp) if ramp else [SizePhase(0, 0, batch)]

    def size_at(self, step: int) -> int:
        """Samples of a step."""
        return self._phase_of(step).size

    def samples_before(self, step: int) -> int:
        """Samples of all earlier steps, which is also the number of this step's first sample."""
        phase = self._phase_of(step)
        return phase.sample + (step - phase.step) * phase.size

    def full_steps_in(self, samples: int) -> int:
        """How many full steps this many samples are enough for."""
        phase = self.phases[bisect_right(self.phases, samples, key=lambda phase: phase.sample) - 1]
        return phase.step + (samples - phase.sample) // phase.size

    def steps_to_cover(self, samples: int) -> int:
        """How many steps it takes to see all of this many samples."""
        steps = self.full_steps_in(samples)
        return steps + (self.samples_before(steps) < samples)

    def _phase_of(self, step: int) -> SizePhase:
        return self.phases[bisect_right(self.phases, step, key=lambda phase: phase.step) - 1]


def _ramp_phases(batch: int, start: int, increment: int, samples: int) -> list[SizePhase]:
    """After c samples the batch size is start + increment * floor(c * increases / samples), at most `batch`."""
    increases = (batch - start) // increment
    phases: list[SizePhase] = []
    step = sample = reached = 0
    while reached < increases:
        reached = min(increases, sample * increases // samples)
        size = start + reached * increment
        phases.append(SizePhase(step, sample, size))
        next_increase = -(-(reached + 1) * samples // increases)
        steps = -(-(next_increase - sample) // size)
        step, sample = step + steps, sample + steps * size
    return phases
