"""Learning rate schedules: the learning rate of each step, with warm-up and decay."""

from __future__ import annotations

import math
from collections.abc import Callable

from textmill.config import TrainConfig


def warmup_steps(train: TrainConfig) -> int:
    """Warm-up in steps; `train.warmup` below 1 is a fraction of the run."""
    return round(train.warmup * train.steps) if train.warmup < 1 else int(train.warmup)


def lr_at(step: int, train: TrainConfig, decay_from: int = 0) -> float:
    """The learning rate of step `step`, counted from 0: warm-up to the maximum, then the decay of the schedule.

    A decay that ends with the run does not start before the step `decay_from`.
    """
    warmup, low, high = warmup_steps(train), train.min_learning_rate, train.learning_rate
    if train.schedule == "range_test":
        return _range_test(step, train)
    if step < warmup:
        return (
            high * (step + 1) / warmup
            if train.warmup_shape == "linear"
            else low + (high - low) * _log_rise(step, warmup)
        )
    if train.schedule == "inverse_sqrt":
        return max(low, high * math.sqrt(max(warmup, 1) / max(step + 1, 1)))
    start = warmup if train.decay_steps else max(warmup, decay_from)
    if step < start:
        return high
    return low + (high - low) * DECAYS[train.schedule](step - start, (train.decay_steps or train.steps) - start, train)


def _log_rise(step: int, warmup: int) -> float:
    """DeepSpeed's logarithmic warm-up, from 0 in the first step to 1."""
    return math.log(step + 1) / math.log(max(2, warmup))


def _range_test(step: int, train: TrainConfig) -> float:
    """DeepSpeed's learning rate range test: the rate only rises, to find the largest one that still trains."""
    intervals = (step + 1) / train.range_test.steps
    return train.min_learning_rate * (
        1 + train.range_test.rate * (math.floor(intervals) if train.range_test.staircase else intervals)
    )


def _fraction(step: int, steps: int) -> float:
    return min(1.0, step / max(1, steps))


def _linear(step: int, steps: int, train: TrainConfig) -> float:
    return 1 - _fraction(step, steps)


def _cosine(step: int, steps: int, train: TrainConfig) -> float:
    return (1 + math.cos(math.pi * _fraction(step, steps))) / 2


def _constant(step: int, steps: int, train: TrainConfig) -> float:
    return 1.0


def _stable(step: int, steps: int, train: TrainConfig) -> float:
    """Constant, then linear decay over the last fraction of the steps (warmup-stable-decay)."""
    decay_steps = max(1, round(train.stable.decay_fraction * steps))
    return 1 - _fraction(max(0, step - (steps - decay_steps)), decay_steps)


DECAYS: dict[str, Callable[[int, int, TrainConfig], float]] = {
    "cosine": _cosine, "linear": _linear, "constant": _constant, "stable": _stable,
}  # fmt: skip
"""Remaining fraction of (max - min) learning rate after `step` of `steps` decay steps."""
