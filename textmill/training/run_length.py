"""The length of a run in steps, computed from steps, epochs, samples or tokens; minutes become steps during the run."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from textmill.config import TrainConfig
from textmill.config.training import UNITS
from textmill.errors import TextmillError
from textmill.schedules import lr_at
from textmill.tokens.batches.batch_sizes import BatchSizes
from textmill.tokens.batches.by_step import Batches

PROVISIONAL_STEPS = 20_000
"""`train.minutes`: a warm-up that is a fraction rises as if the run had this many steps, until the first estimate."""
UNKNOWN = sys.maxsize
"""More steps than any run has."""


@dataclass(frozen=True)
class RunLength:
    """The number of steps of a run, and the samples of each step."""

    train: TrainConfig
    """The settings, with the length of the run in `steps` (with `train.minutes` an estimate until it is known), and the
    memory of `train.average` in steps too."""
    sizes: BatchSizes
    epoch_samples: int
    """Samples of one epoch: one pass over all stores of the train split."""
    sample_length: int
    """Tokens of a sample."""
    measured_at: int | None = None
    """`train.minutes`: the step after which its number of steps was computed; None before."""
    most_steps: int = UNKNOWN
    """`train.max_epochs`: not more steps than these."""

    @property
    def known(self) -> bool:
        """Whether the number of steps is known: always, except in the first steps with `train.minutes`."""
        return self.train.minutes is None or self.measured_at is not None

    @property
    def steps(self) -> int:
        """Steps of the run; while they are not known, the most that it may have."""
        return self.train.steps if self.known else self.most_steps

    def lr_at(self, step: int) -> float:
        """The learning rate of a step; it does not decay before the number of steps is known."""
        return lr_at(step, self.train, (self.measured_at or 0) if self.known else UNKNOWN, self.samples_after)

    def metrics_of(self, done: int) -> dict[str, float]:
        """The learning rate of step number `done`, the epochs after it, and its samples if not all have the same."""
        sizes = {"batch": self.sizes.size_at(done - 1)} if len(self.sizes.phases) > 1 else {}
        epoch = self.samples_after(done) / self.epoch_samples
        return {"learning_rate": self.lr_at(done - 1), "epoch": epoch, **sizes}

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

    def count_due(self, every: int | Literal["epoch"], done: int, steps: int) -> int:
        """How often an action is due from the end of step `done` to the end of a run of `steps` steps."""
        size = self.epoch_samples if every == "epoch" else every
        before, last_before, last = (
            (self.samples_after(step) if every == "epoch" else step) // size for step in (done - 1, steps - 1, steps)
        )
        return last - before + (last == last_before)

    def estimated(self, steps: int) -> RunLength:
        """`train.minutes`: with a first estimate of the steps, which turns a fraction of warm-up into steps for
        good."""
        warmup = round(self.train.warmup * steps) if self.train.warmup < 1 else self.train.warmup
        return replace(self, train=self.train.model_copy(update={"steps": steps, "warmup": warmup}))

    def measured(self, steps: int, done: int) -> RunLength:
        """`train.minutes`: with the number of steps, computed after `done` of them."""
        _check_warmup(self.train, steps)
        return replace(self, train=self.train.model_copy(update={"steps": steps}), measured_at=done)

    def save_state(self) -> dict[str, Any]:
        """`train.minutes`: what a checkpoint stores, so that a resumed run has the same number of steps and warm-up."""
        if self.train.minutes is None:
            return {}
        steps = self.steps if self.known else None
        limits = {"minutes": self.train.minutes, "max_epochs": self.train.max_epochs}
        return {**limits, "steps": steps, "measured_at": self.measured_at, "warmup": self.train.warmup}

    def describe(self) -> str:
        """The length of the run in one line."""
        if not self.known:
            return f"as many steps as fit in train.minutes={self.train.minutes:g}; the first steps are timed"
        sizes = self.sizes.phases
        batch = f"{self.train.batch:,} samples"
        if len(sizes) > 1 and not self.train.batch_rampup:
            batch += f" from step {sizes[-1].step + 1:,} on"
        elif len(sizes) > 1:
            batch = f"{sizes[0].size:,} samples, growing to {sizes[-1].size:,} from step {sizes[-1].step + 1:,} on"
        epochs = self.samples_after(self.steps) / self.epoch_samples
        return (
            f"{self.steps:,} steps of {batch}, {self.sample_length:,} tokens each: "
            f"{self.tokens_after(self.steps):,} tokens, {epochs:.2f} epochs of {self.epoch_samples:,} samples"
        )


def plan_run_length(
    train: TrainConfig, batches: Batches, sample_length: int, saved: dict[str, Any] | None = None
) -> RunLength:
    """The length of the run that `train` sets; epochs are rounded up to whole steps, samples and tokens down.

    `saved` is what the checkpoint to resume from stores of `train.minutes`.
    """
    sizes, epoch_samples = batches.sizes, sum(layout.samples_per_epoch for layout in batches.layouts)
    memory = train.average.memory_in_steps(epoch_samples / train.batch)
    train = train.model_copy(update={"average": train.average.model_copy(update={"memory": memory})})
    most = UNKNOWN if train.max_epochs is None else _steps_of_epochs(train.max_epochs, sizes, epoch_samples)
    if train.minutes is not None:
        _check_warmup(train, most)
        return _restore(RunLength(train, sizes, epoch_samples, sample_length, most_steps=most), saved or {})
    steps = train.steps
    if train.epochs is not None:
        steps = _steps_of_epochs(train.epochs, sizes, epoch_samples)
    elif train.samples is not None:
        steps = sizes.full_steps_in(train.samples)
    elif train.tokens is not None:
        steps = sizes.full_steps_in(train.tokens // sample_length)
    steps, unit, amount = min(steps, most), train.unit, getattr(train, train.unit)
    if not steps:
        first_step = sizes.size_at(0) * sample_length
        raise TextmillError(
            f"train.{unit}: {amount:,} is less than one step, which has {first_step:,} tokens; raise it"
        )
    _check_warmup(train, steps)
    resolved = train.model_copy(update={**dict.fromkeys(UNITS), "steps": steps})
    return RunLength(resolved, sizes, epoch_samples, sample_length)


def _steps_of_epochs(epochs: float, sizes: BatchSizes, epoch_samples: int) -> int:
    return sizes.steps_to_cover(math.ceil(Fraction(str(epochs)) * epoch_samples))


def _restore(length: RunLength, saved: dict[str, Any]) -> RunLength:
    """The length that a checkpoint stores; other minutes or epochs are measured again, with the same warm-up."""
    limits = length.train.minutes, length.train.max_epochs
    same = bool(saved.get("steps")) and (saved["minutes"], saved.get("max_epochs")) == limits
    changes = {
        "steps": saved["steps"] if same else PROVISIONAL_STEPS,
        "warmup": saved.get("warmup", length.train.warmup),
    }
    measured_at = saved["measured_at"] if same else None
    return replace(length, train=length.train.model_copy(update=changes), measured_at=measured_at)


def _check_warmup(train: TrainConfig, steps: int) -> None:
    if train.warmup >= 1 and train.warmup > steps:
        limit = f" and train.max_epochs={train.max_epochs:g}" if train.max_epochs else ""
        raise TextmillError(
            f"train.warmup: {train.warmup} is more than the {steps:,} steps of "
            f"train.{train.unit}={getattr(train, train.unit)}{limit}; lower it, or set a fraction of the "
            "run, such as 0.1"
        )
