"""The learning rate against the formulas, at every step of small runs."""

from __future__ import annotations

import math

import pytest

from textmill.config import TrainConfig
from textmill.errors import TextmillError
from textmill.training.run_length import lr_at


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedules_match_their_formulas(schedule: str) -> None:
    train = TrainConfig(schedule=schedule, steps=50, warmup=10, learning_rate=1.0, min_learning_rate=0.1)  # type: ignore[arg-type]
    for step in range(50):
        if step < 10:
            wanted = (step + 1) / 10
        else:
            gone = (step - 10) / 40
            falls = {"cosine": (1 + math.cos(math.pi * gone)) / 2, "linear": 1 - gone, "constant": 1.0}
            wanted = 0.1 + 0.9 * falls[schedule]
        assert lr_at(step, train) == pytest.approx(wanted, rel=1e-12)


def test_first_and_last_learning_rate() -> None:
    train = TrainConfig(steps=100, warmup=0.1, learning_rate=2.0, min_learning_rate=0.5)
    assert lr_at(0, train) == 0.2
    assert lr_at(9, train) == lr_at(10, train) == 2.0
    assert lr_at(100, train) == lr_at(5000, train) == 0.5
    assert lr_at(0, TrainConfig(steps=10, warmup=0, learning_rate=3.0)) == 3.0


def test_decay_steps_differ_from_the_run_length() -> None:
    short = TrainConfig(
        schedule="linear", steps=100, decay_steps=40, warmup=10, learning_rate=1.0, min_learning_rate=0.1
    )
    long = TrainConfig(schedule="linear", steps=100, decay_steps=210, warmup=10, learning_rate=1.0)
    assert [lr_at(step, short) for step in (10, 25, 40, 99)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert lr_at(110, long) == pytest.approx(0.5)


def test_decay_in_samples_matches_megatron() -> None:
    """Megatron's AnnealingLR counts samples: after n of them, less the warm-up, of the decay, less the warm-up."""
    steps = {"schedule": "cosine", "steps": 100, "warmup": 10, "learning_rate": 1.0, "min_learning_rate": 0.1}
    by_steps = TrainConfig.model_validate({**steps, "decay_steps": 80, "batch": 16})
    by_samples = TrainConfig.model_validate({**steps, "decay_samples": 80 * 16, "batch": 16})
    assert [lr_at(step, by_samples) for step in range(100)] == pytest.approx([lr_at(s, by_steps) for s in range(100)])
    sizes = [8] * 20 + [16] * 80  # a ramp-up: 20 steps of 8 samples
    before = [sum(sizes[:step]) for step in range(100)]
    for step in range(10, 100):
        gone = min(1.0, (before[step] - before[10]) / (1000 - before[10]))
        wanted = 0.1 + 0.9 * (1 + math.cos(math.pi * gone)) / 2
        train = by_samples.model_copy(update={"decay_samples": 1000})
        assert lr_at(step, train, samples_before=before.__getitem__) == pytest.approx(wanted, rel=1e-12)


def test_two_ends_of_the_decay_are_refused() -> None:
    with pytest.raises(TextmillError, match=r"train\.decay_samples: .* train\.decay_steps=5 too; keep one"):
        TrainConfig(decay_steps=5, decay_samples=80)


def test_stable_decays_only_at_the_end() -> None:
    train = TrainConfig(
        schedule="stable", steps=110, warmup=10, decay_fraction=0.2, learning_rate=1.0, min_learning_rate=0.2
    )
    # The last 22 of 110 steps, whatever the warm-up.
    assert [lr_at(step, train) for step in (10, 50, 88, 99, 110)] == pytest.approx([1.0, 1.0, 1.0, 0.6, 0.2])
    long_warmup = train.model_copy(update={"warmup": 100})
    assert [lr_at(step, long_warmup) for step in (99, 100, 105)] == pytest.approx([1.0, 1.0, 0.6])
    by_samples = train.model_copy(update={"decay_samples": 110 * 32})
    assert [lr_at(step, by_samples, samples_before=lambda step: 32 * step) for step in (88, 99)] == pytest.approx(
        [1.0, 0.6]
    )


def test_inverse_square_root() -> None:
    train = TrainConfig(schedule="inverse_sqrt", steps=1000, warmup=100, learning_rate=0.5, min_learning_rate=0.2)
    assert lr_at(99, train) == 0.5
    for step in (100, 200, 399):
        assert lr_at(step, train) == pytest.approx(0.5 * math.sqrt(100) / math.sqrt(step + 1))
    assert lr_at(5000, train) == 0.2


@pytest.mark.parametrize("warmup", [1, 2, 7, 100])
def test_schedules_match_deepspeed(warmup: int) -> None:
    """WarmupDecayLR as it is described: gamma = ln(i+1)/ln(max(2, warmup)), then (total - i)/max(1, total - warmup),
    to the minimum."""
    low, high, total = 3.5e-5, 3.5e-4, 300
    train = TrainConfig(
        schedule="linear", warmup_shape="log", steps=total, warmup=warmup, learning_rate=high, min_learning_rate=low
    )
    for step in range(total + 20):
        rise = math.log(step + 1) / math.log(max(2, warmup))
        gamma = rise if step < warmup else max(0.0, (total - step) / max(1, total - warmup))
        assert lr_at(step, train) == pytest.approx(low + (high - low) * gamma, rel=1e-12)


def test_the_range_test() -> None:
    train = TrainConfig(schedule="range_test", steps=100, min_learning_rate=1e-3, range_test_steps=20)
    for step in range(100):
        assert lr_at(step, train) == pytest.approx(1e-3 * (1 + (step + 1) / 20), rel=1e-12)


def test_boundaries_match_megatron() -> None:
    """lr(x) after x updates: the maximum after warm-up, the minimum after decay, the mean in the middle of a cosine."""
    train = TrainConfig(
        schedule="cosine", steps=400, decay_steps=300, warmup=100, learning_rate=1.5e-4, min_learning_rate=1e-5
    )
    assert lr_at(100, train) == 1.5e-4
    assert lr_at(200, train) == pytest.approx((1.5e-4 + 1e-5) / 2)
    assert lr_at(300, train) == pytest.approx(1e-5)
    assert lr_at(399, train) == pytest.approx(1e-5)


def test_a_range_test_needs_a_min_learning_rate() -> None:
    with pytest.raises(TextmillError, match=r"train\.min_learning_rate"):
        TrainConfig(schedule="range_test")
