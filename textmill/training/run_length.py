"""The course of a run: its length in steps, whatever unit it was said in, and when something is due."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from textmill.config import TrainConfig
from textmill.config.training import UNITS
from textmill.errors import TextmillError
from textmill.tokens.batches.batch_sizes import Sizes
from textmill.tokens.batches.by_step import Batches


@dataclass(frozen=True)
class RunLength:
    """Steps from the first to the last, and the samples that each of them has."""

    train: TrainConfig
    """The settings, with the run's length in `steps`."""
    sizes: Sizes
    epoch: int
    """Samples of a pass over the train split; of several stores, as many as they have together."""
    length: int
    """Tokens of a sample."""

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.train.steps

    def samples(self, done: int) -> int:
        """Samples seen after so many steps."""
        return self.sizes.before(done)

    def due(self, every: int | Literal["epoch"], done: int) -> bool:
        """Whether something that comes every so many steps, or after each epoch, and at the end, comes after so many steps."""
        if every == "epoch":
            return done == self.steps or self.samples(done) // self.epoch > self.samples(done - 1) // self.epoch
        return done == self.steps or done % every == 0

    def spoken(self) -> str:
        """The whole course in a line."""
        samples, sizes = self.samples(self.steps), self.sizes.stretches
        batch = f"{self.train.batch:,} samples"
        if len(sizes) > 1:
            batch = f"{sizes[0].size:,} samples, growing to {sizes[-1].size:,} from step {sizes[-1].step + 1:,} on"
        return (
            f"{self.steps:,} steps of {batch}, {self.length:,} tokens each: {samples * self.length:,} tokens, "
            f"{samples / self.epoch:.2f} epochs of {self.epoch:,} samples"
        )


def plan_run_length(train: TrainConfig, batches: Batches, length: int) -> RunLength:
    """The course that `train` describes, now that the data is known; epochs are rounded up to a whole step, samples and tokens down."""
    sizes, epoch = batches.sizes, sum(layout.samples for layout in batches.layouts)
    steps = train.steps
    if train.epochs is not None:
        steps = sizes.steps_over(math.ceil(Fraction(str(train.epochs)) * epoch))
    elif train.samples is not None:
        steps = sizes.steps_in(train.samples)
    elif train.tokens is not None:
        steps = sizes.steps_in(train.tokens // length)
    unit, said = train.unit, getattr(train, train.unit)
    if not steps:
        raise TextmillError(
            f"train.{unit}: {said:,} is less than the first step has ({sizes.at(0) * length:,} tokens); raise it"
        )
    if train.warmup >= 1 and train.warmup > steps:
        raise TextmillError(
            f"train.warmup: {train.warmup} is above the {steps:,} steps of train.{unit}={said}; lower it, or give a share"
        )
    return RunLength(train.model_copy(update={**dict.fromkeys(UNITS), "steps": steps}), sizes, epoch, length)
