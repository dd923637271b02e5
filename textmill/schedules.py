"""The learning rate of a step, as a pure function."""

from __future__ import annotations

import math
from collections.abc import Callable

from textmill.config import TrainConfig


def warmup_steps(train: TrainConfig) -> int:
    """Steps of warm-up, whether given as steps or as a share of the run."""
    return round(train.warmup * train.steps) if train.warmup < 1 else int(train.warmup)


def lr_at(step: int, train: TrainConfig) -> float:
    """The rate of update number `step`, counted from 0: it rises to the highest, then goes the way of its schedule."""
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
    return low + (high - low) * DECAYS[train.schedule](
        step - warmup, (train.decay_steps or train.steps) - warmup, train
    )


def _log_rise(step: int, warmup: int) -> float:
    """DeepSpeed's warm-up: the logarithm of the step, from 0 in the first one."""
    return math.log(step + 1) / math.log(max(2, warmup))


def _range_test(step: int, train: TrainConfig) -> float:
    """DeepSpeed's probe for the largest rate that a net bears: it only ever rises."""
    passed = (step + 1) / train.range_test.steps
    return train.min_learning_rate * (
        1 + train.range_test.rate * (math.floor(passed) if train.range_test.staircase else passed)
    )


def _fraction(gone: int, whole: int) -> float:
    return min(1.0, gone / max(1, whole))


def _linear(gone: int, whole: int, train: TrainConfig) -> float:
    return 1 - _fraction(gone, whole)


def _cosine(gone: int, whole: int, train: TrainConfig) -> float:
    return (1 + math.cos(math.pi * _fraction(gone, whole))) / 2


def _constant(gone: int, whole: int, train: TrainConfig) -> float:
    return 1.0


def _stable(gone: int, whole: int, train: TrainConfig) -> float:
    """High until the last share of the way, then down in a line."""
    down = max(1, round(train.stable.decay_fraction * whole))
    return 1 - _fraction(max(0, gone - (whole - down)), down)


DECAYS: dict[str, Callable[[int, int, TrainConfig], float]] = {
    "cosine": _cosine, "linear": _linear, "constant": _constant, "stable": _stable,
}  # fmt: skip
"""What is left of the rise after so many steps of so many."""
