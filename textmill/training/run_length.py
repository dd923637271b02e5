"""The length of a run in steps, computed from steps, epochs, samples or tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from textmill.config import TrainConfig
from textmill.config.training import UNITS
from textmill.errors import TextmillError
from textmill.tokens.batches.batch_sizes import BatchSizes
from textmill.tokens.batches.by_step import Batches


@dataclass(frozen=True)
class RunLength:
    """The number of steps of a run, and the samples of each step."""

    train: TrainConfig
    """The settings, with the length of the run in `steps`."""
    sizes: BatchSizes
    epoch_samples: int
    """Samples of one epoch: one pass over all stores of the train split."""
    sample_length: int
    """Tokens of a sample."""

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.train.steps

    def samples_after(self, done: int) -> int:
        """Samples seen after `done` steps."""
        return self.sizes.samples_before(done)

    def tokens_after(self, done: int) -> int:
        """Tokens seen after `done` steps."""
        return self.samples_after(done) * self.sample_length

    def is_due(self, every: int | Literal["epoch"], done: int) -> bool:
        """True if an action is due after step `done`: every N steps or after each epoch, and always after the last."""
        if done == self.steps:
            return True
        if every == "epoch":
            epochs = [self.samples_after(step) // self.epoch_samples for step in (done - 1, done)]
            return epochs[1] > epochs[0]
        return done % every == 0

    def describe(self) -> str:
        """The length of the run in one line."""
        sizes = self.sizes.phases
        batch = f"{self.train.batch:,} samples"
        if len(sizes) > 1:
            batch = f"{sizes[0].size:,} samples, growing to {sizes[-1].size:,} from step {sizes[-1].step + 1:,} on"
        epochs = self.samples_after(self.steps) / self.epoch_samples
        return (
            f"{self.steps:,} steps of {batch}, {self.sample_length:,} tokens each: "
            f"{self.tokens_after(self.steps):,} tokens, {epochs:.2f} epochs of {self.epoch_samples:,} samples"
        )


def plan_run_length(train: TrainConfig, batches: Batches, sample_length: int) -> RunLength:
    """The length of the run that `train` sets; epochs are rounded up to whole steps, samples and tokens down."""
    sizes, epoch_samples = batches.sizes, sum(layout.samples_per_epoch for layout in batches.layouts)
    steps = train.steps
    if train.epochs is not None:
        steps = sizes.steps_to_cover(math.ceil(Fraction(str(train.epochs)) * epoch_samples))
    elif train.samples is not None:
        steps = sizes.full_steps_in(train.samples)
    elif train.tokens is not None:
        steps = sizes.full_steps_in(train.tokens // sample_length)
    unit, amount = train.unit, getattr(train, train.unit)
    if not steps:
        first_step = sizes.size_at(0) * sample_length
        raise TextmillError(
            f"train.{unit}: {amount:,} is less than one step, which has {first_step:,} tokens; raise it"
        )
    if train.warmup >= 1 and train.warmup > steps:
        raise TextmillError(
            f"train.warmup: {train.warmup} is more than the {steps:,} steps of train.{unit}={amount}; "
            "lower it, or set a fraction of the run, such as 0.1"
        )
    resolved = train.model_copy(update={**dict.fromkeys(UNITS), "steps": steps})
    return RunLength(resolved, sizes, epoch_samples, sample_length)
