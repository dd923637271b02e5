"""Learning rate schedules: the learning rate of each step, with warm-up and decay.

`learning_rate` 1.0, `warmup` 10 steps and cosine over 110 steps: 0.1 in step 0, 1.0 in steps 9 and 10, 0.5 in step 60
(half of the 100 decay steps), then towards `min_learning_rate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from textmill.config import TrainConfig
from textmill.config.own_files import is_own_file, load_part
from textmill.errors import TextmillError


def warmup_steps(train: TrainConfig) -> int:
    """Warm-up in steps; `train.warmup` below 1 is a fraction of the run."""
    return round(train.warmup * train.steps) if train.warmup < 1 else int(train.warmup)


def decay_end(train: TrainConfig) -> float:
    """The step at which the decay ends, in steps of `train.batch` samples."""
    if train.decay_steps:
        return train.decay_steps
    return train.decay_samples / train.batch if train.decay_samples else train.steps


def lr_at(
    step: int, train: TrainConfig, decay_start: float | None = None, samples_before: Callable[[int], int] | None = None
) -> float:
    """The learning rate of step `step`, counted from 0: warm-up to the maximum, then the decay of the schedule.

    A decay that ends with the run starts at `decay_start`, without it after the warm-up. `samples_before` returns how
    many samples are before a step; without it, all steps have `train.batch`.
    """
    if is_own_file(train.schedule):
        return _own_rate(step, train)
    warmup = warmup_steps(train)
    low = train.min_learning_rate
    high = train.learning_rate
    if train.schedule == "range_test":
        return _range_test(step, train)
    if step < warmup and train.warmup_shape == "linear":
        return high * (step + 1) / warmup
    if step < warmup:
        return low + (high - low) * _log_rise(step, warmup)
    if train.schedule == "inverse_sqrt":
        return max(low, high * math.sqrt(max(warmup, 1) / max(step + 1, 1)))
    start = warmup if decay_start is None or train.decay_steps or train.decay_samples else decay_start
    if step < start:
        return high
    decayed = float(step - start)
    decay_length = decay_end(train) - start
    if train.decay_samples and samples_before:  # counted in samples, since steps have different batch sizes
        decayed = samples_before(step) - samples_before(warmup)
        decay_length = train.decay_samples - samples_before(warmup)
    return low + (high - low) * DECAYS[train.schedule](decayed, decay_length, train)


def _own_rate(step: int, train: TrainConfig) -> float:
    """What the user's own file computes from the step and the settings, in which `steps` is the length of the run."""
    rate = load_part(train.schedule, "train.schedule", "learning_rate")(step, train)
    if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
        raise TextmillError(
            f"train.schedule: learning_rate(step={step}, ...) in {train.schedule} returns {rate!r}; a learning rate is "
            "a finite number of at least 0"
        )
    return float(rate)


def _log_rise(step: int, warmup: int) -> float:
    """DeepSpeed's logarithmic warm-up, from 0 in the first step to 1."""
    return math.log(step + 1) / math.log(max(2, warmup))


def _range_test(step: int, train: TrainConfig) -> float:
    """DeepSpeed's learning rate range test: the rate only rises, to find the largest one that still trains."""
    return train.min_learning_rate * (1 + (step + 1) / train.range_test_steps)


def _fraction(step: float, steps: float) -> float:
    return min(1.0, step / max(1, steps))


def _linear(step: float, steps: float, train: TrainConfig) -> float:
    return 1 - _fraction(step, steps)


def _cosine(step: float, steps: float, train: TrainConfig) -> float:
    return (1 + math.cos(math.pi * _fraction(step, steps))) / 2


def _constant(step: float, steps: float, train: TrainConfig) -> float:
    return 1.0


def _stable(step: float, steps: float, train: TrainConfig) -> float:
    """Constant, then linear decay over the last `train.stable.decay_fraction` of the run (warmup-stable-decay)."""
    whole = train.decay_samples or decay_end(train)
    decay_steps = min(steps, max(1, round(train.stable.decay_fraction * whole)))
    return 1 - _fraction(max(0, step - (steps - decay_steps)), decay_steps)


DECAYS: dict[str, Callable[[float, float, TrainConfig], float]] = {
    "cosine": _cosine,
    "linear": _linear,
    "constant": _constant,
    "stable": _stable,
}
"""Remaining fraction of (max - min) learning rate after `step` of `steps` decay steps, or samples."""
