"""The learning rate of a step, as a pure function."""

from __future__ import annotations

import math

from textmill.config import TrainConfig


def warmup_steps(train: TrainConfig) -> int:
    """Steps of warm-up, whether given as steps or as a share of the run."""
    return round(train.warmup * train.steps) if train.warmup < 1 else int(train.warmup)


def lr_at(step: int, train: TrainConfig) -> float:
    """The rate of update number `step`, counted from 0: it rises to the highest, then falls towards the minimum, met at `train.steps`."""
    warmup, low, high = warmup_steps(train), train.min_learning_rate, train.learning_rate
    if step < warmup:
        return high * (step + 1) / warmup
    if train.schedule == "constant":
        return high
    share = min(1.0, (step - warmup) / max(1, train.steps - warmup))
    fall = 1 - share if train.schedule == "linear" else (1 + math.cos(math.pi * share)) / 2
    return low + (high - low) * fall
