"""How many samples each step has: constant, growing at the start of a run (Megatron's batch size ramp-up), or changed
in mid-run."""

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
        self.phases = _phases(batch, ramp, 0, 0)

    def changed(self, step: int, batch: int, ramp: Sequence[int] = ()) -> BatchSizes:
        """The same sizes before `step`, others from there on; a ramp-up goes on from the samples seen so far."""
        sizes = BatchSizes(batch, ramp)
        sizes.phases = [phase for phase in self.phases if phase.step < step]
        sizes.phases += _phases(batch, ramp, step, self.samples_before(step))
        return sizes

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


def _phases(batch: int, ramp: Sequence[int], step: int, sample: int) -> list[SizePhase]:
    """The phases from a step and its first sample on.

    With a ramp-up (start, increment, samples) the batch size after c samples is
    start + increment * floor(c * increases / samples), at most `batch`. A batch of 8 with the ramp-up 2, 2, 24 grows
    three times in 24 samples: 2 from step 0, 4 from step 4 (sample 8), 6 from step 6 (16), 8 from step 8 (28).
    """
    if not ramp:
        return [SizePhase(step, sample, batch)]
    start, increment, ramp_samples = ramp
    all_increases = (batch - start) // increment
    increases = 0
    phases: list[SizePhase] = []
    while increases < all_increases:
        increases = min(all_increases, sample * all_increases // ramp_samples)
        size = start + increases * increment
        phases.append(SizePhase(step, sample, size))
        next_increase = -(-(increases + 1) * ramp_samples // all_increases)  # the sample at which the batch grows
        steps = -(-(next_increase - sample) // size)
        step = step + steps
        sample = sample + steps * size
    return phases
