"""The length of a run in steps, computed from steps, epochs, samples or tokens; minutes become steps during the run,
and their number is corrected while it lasts (timing.py).

With a batch of 8 samples of 1,024 tokens and 100 samples in an epoch, `train.epochs=2` is 25 steps (200 samples / 8),
`train.tokens=100_000` is 12 steps (97 full samples, 12 full batches), and `train.epochs=1` is 13 steps, of which the
last one reaches into the second epoch.

`lr_at` is the learning rate of a step. `learning_rate` 1.0, `warmup` 10 steps and cosine over 110 steps: 0.1 in step 0,
1.0 in steps 9 and 10, 0.5 in step 60 (half of the 100 decay steps), then towards `min_learning_rate`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from textmill.config import TrainConfig
from textmill.config.own_files import is_own_file, load_part
from textmill.config.training import UNITS
from textmill.errors import TextmillError
from textmill.tokens.batches.blend import BatchSizes

PROVISIONAL_STEPS = 20_000
"""`train.minutes`: until the first estimate, a warm-up that is a fraction rises as if the run had this many steps."""
UNKNOWN = sys.maxsize
"""More steps than any run has."""


@dataclass(frozen=True)
class RunLength:
    """The number of steps of a run, and the samples of each step."""

    train: TrainConfig
    """The settings, with the length of the run in `steps` (with `train.minutes` the latest estimate), and
    `train.ema_window` in steps too."""
    sizes: BatchSizes
    epoch_samples: int
    """Samples of one epoch: one pass over all stores of the train split."""
    sample_length: int
    """Tokens of a sample."""
    decay_start: float | None = None
    """`train.minutes`: the step at which a decay would have started that is now where this one is and ends with the
    run; None before the first estimate of the steps."""
    max_steps: int = UNKNOWN
    """`train.max_epochs`: not more steps than these."""

    @property
    def known(self) -> bool:
        """Whether there is a number of steps: always, except in the first steps with `train.minutes`."""
        return self.train.minutes is None or self.decay_start is not None

    @property
    def steps(self) -> int:
        """Steps of the run; while they are not known, the most that it may have."""
        return self.train.steps if self.known else self.max_steps

    @property
    def train_with_all_steps(self) -> TrainConfig:
        """The settings with the most steps that the run may have; the same when it is resumed, since the engine decides
        with them whether to compile."""
        most = self.train.steps if self.train.minutes is None else self.max_steps
        return self.train.model_copy(update={"steps": most})

    def lr_at(self, step: int) -> float:
        """The learning rate of a step; it does not decay before the number of steps is known."""
        return lr_at(step, self.train, self._decay_start, self.samples_after)

    @property
    def _decay_start(self) -> float | None:
        """The step from which schedules decay; None: after the warm-up."""
        return self.decay_start if self.known else UNKNOWN

    def metrics_of(self, done: int) -> dict[str, float]:
        """The learning rate of step number `done`, the epochs after it, and its samples if not all have the same."""
        epoch = self.samples_after(done) / self.epoch_samples
        metrics = {"learning_rate": self.lr_at(done - 1), "epoch": epoch}
        if len(self.sizes.phases) > 1:
            metrics["batch"] = self.sizes.size_at(done - 1)
        return metrics

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
        return self._times_due(every, done) > self._times_due(every, done - 1)

    def count_due(self, every: int | Literal["epoch"], done: int, steps: int) -> int:
        """How often an action is due from the end of step `done` to the end of a run of `steps` steps."""
        in_interval = self._times_due(every, steps) - self._times_due(every, done - 1)
        due_after_last = self._times_due(every, steps) > self._times_due(every, steps - 1)
        return in_interval if due_after_last else in_interval + 1  # after the last step it is always due

    def _times_due(self, every: int | Literal["epoch"], done: int) -> int:
        """How often an interval of N steps, or an epoch, has ended within the first `done` steps."""
        return self.samples_after(done) // self.epoch_samples if every == "epoch" else done // every

    def with_measured_steps(self, steps: int, done: int) -> RunLength:
        """`train.minutes`: with a new number of steps, computed after `done` of them.

        The learning rate continues from where it is: the rest of its decay is stretched over the remaining steps. Only
        a warm-up that is a fraction of the run may jump, while it lasts.
        """
        if self.known and steps == self.steps:
            return self
        if not self.known:
            _check_warmup(self.train, steps)
        train = self.train.model_copy(update={"steps": steps})
        start: float = max(train.warmup_steps, done)
        if self.decay_start is not None and self.decay_start < done == start:
            decayed = (done - self.decay_start) / (self.steps - self.decay_start)
            start = (done - decayed * steps) / (1 - decayed)
        return replace(self, train=train, decay_start=start)

    def save_state(self) -> dict[str, Any]:
        """`train.minutes`: what a checkpoint stores, so that a resumed run has the same steps and learning rates."""
        if self.train.minutes is None:
            return {}
        steps = self.steps if self.known else None
        limits = {"minutes": self.train.minutes, "max_epochs": self.train.max_epochs}
        return {**limits, "steps": steps, "decay_start": self.decay_start}

    def describe(self) -> str:
        """The length of the run in one line."""
        if not self.known:
            minutes = round(self.train.minutes or 0, 2)
            return f"as many steps as fit in train.minutes={minutes:g}; the first steps are timed"
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
    train: TrainConfig, sizes: BatchSizes, epoch_samples: int, sample_length: int, saved: dict[str, Any] | None = None
) -> RunLength:
    """The length of the run that `train` sets; epochs are rounded up to whole steps, samples and tokens down.

    An epoch has `epoch_samples` of `sample_length` tokens. `saved` is what the checkpoint to resume from stores of
    `train.minutes`.
    """
    train = train.model_copy(update={"ema_window": train.ema_steps(epoch_samples / train.batch)})
    max_steps = UNKNOWN if train.max_epochs is None else _steps_of_epochs(train.max_epochs, sizes, epoch_samples)
    if train.minutes is not None:
        _check_warmup(train, max_steps)
        return _restore(RunLength(train, sizes, epoch_samples, sample_length, max_steps=max_steps), saved or {})
    steps = train.steps
    if train.epochs is not None:
        steps = _steps_of_epochs(train.epochs, sizes, epoch_samples)
    elif train.samples is not None:
        steps = sizes.full_steps_in(train.samples)
    elif train.tokens is not None:
        steps = sizes.full_steps_in(train.tokens // sample_length)
    steps = min(steps, max_steps)
    if not steps:
        amount = getattr(train, train.unit)
        first_step = sizes.size_at(0) * sample_length
        raise TextmillError(
            f"train.{train.unit}: {amount:,} is less than one step, which has {first_step:,} tokens; raise it"
        )
    _check_warmup(train, steps)
    only_steps = train.model_copy(update={**dict.fromkeys(UNITS), "steps": steps})
    lr_at(steps - 1, only_steps)  # an own schedule that fails at the end of the run shall fail now
    return RunLength(only_steps, sizes, epoch_samples, sample_length)


def _steps_of_epochs(epochs: float, sizes: BatchSizes, epoch_samples: int) -> int:
    return sizes.steps_to_cover(math.ceil(Fraction(str(epochs)) * epoch_samples))


def _restore(length: RunLength, saved: dict[str, Any]) -> RunLength:
    """The length that a checkpoint stores; for other minutes or epochs the steps are estimated again."""
    steps = saved.get("steps") or PROVISIONAL_STEPS
    same_limits = (saved.get("minutes"), saved.get("max_epochs")) == (length.train.minutes, length.train.max_epochs)
    decay_start = saved.get("decay_start") if same_limits else None
    return replace(length, train=length.train.model_copy(update={"steps": steps}), decay_start=decay_start)


def _check_warmup(train: TrainConfig, steps: int) -> None:
    if train.warmup >= 1 and train.warmup > steps:
        limit = f" and train.max_epochs={train.max_epochs:g}" if train.max_epochs else ""
        raise TextmillError(
            f"train.warmup: {train.warmup} is more than the {steps:,} steps of "
            f"train.{train.unit}={getattr(train, train.unit)}{limit}; lower it, or set a fraction of the "
            "run, such as 0.1"
        )


def lr_at(
    step: int, train: TrainConfig, decay_start: float | None = None, samples_before: Callable[[int], int] | None = None
) -> float:
    """The learning rate of step `step`, counted from 0: warm-up to the maximum, then the decay of the schedule.

    A decay that ends with the run starts at `decay_start`, without it after the warm-up. `samples_before` returns how
    many samples are before a step; without it, all steps have `train.batch`.
    """
    if is_own_file(train.schedule):
        return _own_rate(step, train)
    warmup = train.warmup_steps
    low = train.min_learning_rate
    high = train.learning_rate
    if train.schedule == "range_test":  # DeepSpeed's: the rate only rises, to find the largest one that still trains
        return low * (1 + (step + 1) / train.range_test_steps)
    if step < warmup and train.warmup_shape == "linear":
        return high * (step + 1) / warmup
    if step < warmup:
        risen = math.log(step + 1) / math.log(max(2, warmup))  # DeepSpeed's, from 0 in the first step to 1
        return low + (high - low) * risen
    if train.schedule == "inverse_sqrt":
        return max(low, high * math.sqrt(max(warmup, 1) / max(step + 1, 1)))
    start = warmup if decay_start is None or train.decay_steps or train.decay_samples else decay_start
    if step < start:
        return high
    decayed = float(step - start)
    decay_length = train.decay_end - start
    if train.decay_samples and samples_before:  # counted in samples, since steps have different batch sizes
        decayed = samples_before(step) - samples_before(warmup)
        decay_length = train.decay_samples - samples_before(warmup)
    return low + (high - low) * _remaining(decayed, decay_length, train)


def _own_rate(step: int, train: TrainConfig) -> float:
    """What the user's own file computes from the step and the settings, in which `steps` is the length of the run."""
    rate = load_part(train.schedule, "train.schedule", "learning_rate")(step, train)
    if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
        raise TextmillError(
            f"train.schedule: learning_rate(step={step}, ...) in {train.schedule} returns {rate!r}; a learning rate is "
            "a finite number of at least 0"
        )
    return float(rate)


def _remaining(step: float, steps: float, train: TrainConfig) -> float:
    """The remaining fraction of (max - min) learning rate after `step` of `steps` decay steps, or samples."""
    if train.schedule == "constant":
        return 1.0
    if train.schedule == "stable":  # constant, then linear over the last part of the run (warmup-stable-decay)
        whole = train.decay_samples or train.decay_end
        decay_steps = min(steps, max(1, round(train.decay_fraction * whole)))
        step = max(0, step - (steps - decay_steps))
        steps = decay_steps
    fraction = min(1.0, step / max(1, steps))
    return (1 + math.cos(math.pi * fraction)) / 2 if train.schedule == "cosine" else 1 - fraction
