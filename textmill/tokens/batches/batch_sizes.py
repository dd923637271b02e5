"""How many samples each step has: the same for all, or growing at the beginning of a run by Megatron's rule for its batch"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stretch:
    """Steps of one size, up to where the next stretch begins."""

    step: int
    """The first of them."""
    sample: int
    """The first sample of that step."""
    size: int


class Sizes:
    """Batch sizes and where each step's samples begin, as pure functions of the step."""

    def __init__(self, batch: int, ramp: Sequence[int] = ()) -> None:
        self.stretches = _stretches(batch, *ramp) if ramp else [Stretch(0, 0, batch)]

    def at(self, step: int) -> int:
        """Samples of a step."""
        return self._of(step).size

    def before(self, step: int) -> int:
        """Samples of all steps before one: its own first sample."""
        found = self._of(step)
        return found.sample + (step - found.step) * found.size

    def steps_in(self, samples: int) -> int:
        """Whole steps that so many samples make."""
        found = self.stretches[bisect_right(self.stretches, samples, key=lambda one: one.sample) - 1]
        return found.step + (samples - found.sample) // found.size

    def steps_over(self, samples: int) -> int:
        """Steps after which all of so many samples were seen."""
        whole = self.steps_in(samples)
        return whole + (self.before(whole) < samples)

    def _of(self, step: int) -> Stretch:
        return self.stretches[bisect_right(self.stretches, step, key=lambda one: one.step) - 1]


def _stretches(batch: int, start: int, increment: int, samples: int) -> list[Stretch]:
    """A step before which c samples were seen has start + increment * floor(c * rises / samples) of them, up to the whole batch."""
    rises = (batch - start) // increment
    found: list[Stretch] = []
    step = sample = reached = 0
    while reached < rises:
        reached = min(rises, sample * rises // samples)
        size = start + reached * increment
        found.append(Stretch(step, sample, size))
        edge = -(-(reached + 1) * samples // rises)
        steps = -(-(edge - sample) // size)
        step, sample = step + steps, sample + steps * size
    return found
