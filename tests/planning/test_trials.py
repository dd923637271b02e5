"""Which trials `textmill tune` runs, with results from a formula instead of runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from textmill.commands.tune import table_row
from textmill.config import TrainConfig
from textmill.planning.trials import Lengths, Outcome, Result, Trial, needed_minutes, search, trial_minutes

TRAIN = TrainConfig(learning_rate=0.01, weight_decay=1.0, batch=32, optimizer="muon")
NET = {"width": 256, "dropout": 0.1}
BEST = {"train.learning_rate": 0.02, "train.weight_decay": 0.5, "train.batch": 16.0, "model.shape.width": 384.0}
START = {"train.learning_rate": 0.01, "train.weight_decay": 1.0, "train.batch": 32.0, "model.shape.width": 256.0}


def loss_of(trial: Trial) -> float:
    """A bowl with its lowest point at BEST."""
    values = START | {key: float(trial.changes[key]) for key in START if key in trial.changes}
    return 1.0 + 0.1 * sum(math.log2(values[key] / BEST[key]) ** 2 for key in BEST)


def run_all(lengths: Lengths, outcome: Outcome, loss: Any = loss_of, steps: int = 100) -> list[Trial]:
    seen: list[Trial] = []

    def run(trial: Trial) -> Result:
        seen.append(trial)
        return Result(loss(trial), steps, 1.0)

    search(TRAIN, NET, True, lengths, outcome, run)
    return seen


def test_the_lowest_point_is_found_and_each_setting_is_worth_its_share() -> None:
    outcome = Outcome()
    run_all(Lengths(2.0, full_minutes=2.0), outcome)
    assert {key: outcome.changes[key] for key in BEST} == pytest.approx(BEST)
    assert outcome.loss == pytest.approx(1.0)
    for key in BEST:
        assert outcome.worth[key] == pytest.approx(0.1 * math.log2(START[key] / BEST[key]) ** 2)
    assert outcome.plan_loss is not None
    assert sum(outcome.worth.values()) == pytest.approx(outcome.plan_loss - 1.0)


def test_gains_within_the_noise_of_two_seeds_are_not_kept() -> None:
    outcome = Outcome()
    run_all(Lengths(2.0), outcome, lambda trial: 3.0 if "train.seed" in trial.changes else loss_of(trial))
    assert outcome.changes == {}
    assert not any(outcome.worth.values())


def test_short_trials_leave_out_what_depends_on_the_length() -> None:
    tried = {trial.setting for trial in run_all(Lengths(1.0, full_minutes=10.0), Outcome())}
    assert tried == {"", "train.seed", "train.learning_rate", "train.batch", "train.muon.adamw_rate_factor"}


def test_a_run_that_is_shorter_than_a_trial_keeps_its_own_length() -> None:
    trials = run_all(Lengths(1.0, full_steps=60), Outcome(), steps=100)
    assert [trial.length for trial in trials[:3]] == [{"train.minutes": 1.0}, {}, {}]
    assert all(not trial.length for trial in trials[1:])


def test_trials_of_a_few_steps_are_not_compared() -> None:
    outcome = Outcome()
    assert len(run_all(Lengths(0.5, full_minutes=10.0), outcome, steps=3)) == 1
    assert outcome.too_short
    outcome = Outcome()
    assert len(run_all(Lengths(0.5, full_steps=5), outcome, steps=3)) > 5  # they are most of the run
    assert not outcome.too_short


def test_the_minutes_that_trials_need() -> None:
    """47 more steps of 6 s make 4.7 minutes, in each of 12 trials; 8 trials as long as the run are enough as well."""
    first = Result(3.0, 3, 30.0, step_seconds=6.0)
    assert needed_minutes(Lengths(0.5, full_minutes=60.0), first) == pytest.approx(12 * (0.5 + 4.7))
    assert needed_minutes(Lengths(0.5, full_minutes=2.0), first) == pytest.approx(16)


def test_large_batches_are_left_out_by_name_if_their_trials_would_be_too_short() -> None:
    def no_better(trial: Trial) -> float:
        return 1.0

    outcome = Outcome()
    tried = run_all(Lengths(0.5, full_minutes=10.0), outcome, no_better, steps=60)
    assert [trial.changes["train.batch"] for trial in tried if trial.setting == "train.batch"] == [16]
    assert outcome.skipped == {"train.batch=64": 30}
    outcome = Outcome()
    tried = run_all(Lengths(6.0, full_minutes=10.0), outcome, no_better, steps=60)
    assert [trial.changes["train.batch"] for trial in tried if trial.setting == "train.batch"] == [16, 64]
    assert not outcome.skipped


@pytest.mark.parametrize(("full_minutes", "is_compared"), [(10.0, False), (0.8, True)])
def test_a_trial_with_fewer_steps_than_expected_is_not_compared(full_minutes: float, is_compared: bool) -> None:
    """Half the batch promises 120 steps, but the machine is slow: of a long run the 24 that it did show nothing."""
    outcome = Outcome()
    seen: list[tuple[Trial, Result]] = []

    def run(trial: Trial) -> Result:
        seen.append((trial, Result(0.5, 24, 30.0) if trial.setting == "train.batch" else Result(1.0, 60, 30.0)))
        return seen[-1][1]

    search(TRAIN, NET, True, Lengths(0.5, full_minutes=full_minutes), outcome, run)
    rows = [table_row(1, trial, result, outcome) for trial, result in seen]
    assert outcome.changes.get("train.batch") == (16 if is_compared else None)
    assert outcome.skipped == ({} if is_compared else {"train.batch=16": 24, "train.batch=64": 30})
    assert any(row.endswith("0.5000  not compared: too few steps") for row in rows) != is_compared


def test_settings_that_change_the_speed_of_a_step_get_the_same_time() -> None:
    trials = run_all(Lengths(2.0, full_minutes=2.0), Outcome())
    by_time = {trial.setting for trial in trials if "train.minutes" in trial.length}
    assert by_time == {"", "model.shape.width", "train.batch", "model.shape.dropout"}


def test_failed_trials_are_not_kept() -> None:
    outcome = Outcome()
    run_all(Lengths(2.0), outcome, lambda trial: None if "train.learning_rate" in trial.changes else loss_of(trial))
    assert "train.learning_rate" not in outcome.changes
    assert "train.batch" in outcome.changes


@given(st.floats(0.1, 1000), st.floats(0.1, 100))
def test_a_trial_is_never_longer_than_the_run_or_the_minutes(minutes: float, full: float) -> None:
    assert trial_minutes(minutes, full) <= min(full, minutes)
