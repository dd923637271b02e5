"""The learning rate against the formulas, at every step of small runs."""

from __future__ import annotations

import math

import pytest

from textmill.config import TrainConfig
from textmill.schedules import lr_at


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_every_step(schedule: str) -> None:
    train = TrainConfig(schedule=schedule, steps=50, warmup=10, learning_rate=1.0, min_learning_rate=0.1)  # type: ignore[arg-type]
    for step in range(50):
        if step < 10:
            wanted = (step + 1) / 10
        else:
            gone = (step - 10) / 40
            falls = {"cosine": (1 + math.cos(math.pi * gone)) / 2, "linear": 1 - gone, "constant": 1.0}
            wanted = 0.1 + 0.9 * falls[schedule]
        assert lr_at(step, train) == pytest.approx(wanted, rel=1e-12)


def test_the_ends() -> None:
    train = TrainConfig(steps=100, warmup=0.1, learning_rate=2.0, min_learning_rate=0.5)
    assert lr_at(0, train) == 0.2
    assert lr_at(9, train) == lr_at(10, train) == 2.0
    assert lr_at(100, train) == lr_at(5000, train) == 0.5
    assert lr_at(0, TrainConfig(steps=10, warmup=0, learning_rate=3.0)) == 3.0
