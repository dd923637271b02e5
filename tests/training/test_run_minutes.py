"""`train.minutes` becomes a number of steps once, from the times of the first steps, and a resumed run keeps it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.kill_train import hash_checkpoint, read_metrics, train_arguments
from tests.support.small_runs import config_for
from tests.support.together import run_together
from textmill.config import AverageConfig, RunConfig, TrainConfig
from textmill.config.load import build_config
from textmill.engines.on_torch import OnTorch
from textmill.errors import Interrupted, TextmillError
from textmill.processes.ranks import SINGLE_PROCESS
from textmill.tokens.batches.blend import BatchSizes
from textmill.tokens.batches.loader import Batches
from textmill.training.loop import train
from textmill.training.run_length import RunLength, plan_run_length
from textmill.training.timing import Costs, MinutesTimer, fitting_steps


@dataclass
class Clock:
    """A clock that is advanced by hand; also the step log of a timer."""

    now: float = 100.0
    paused_seconds: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    @contextmanager
    def paused(self, result: Any) -> Any:
        before = self.now
        yield
        self.paused_seconds += self.now - before


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in ("training.timing", "training.loop", "training.validation"):
        monkeypatch.setattr(f"textmill.{module}.time", made)
    return made


NO_COSTS = Costs(0.0, 0.0, 0.0)
RESULT: Any = SimpleNamespace(loss=1.0)


def log_of(clock: Clock) -> Any:
    return clock


def planned(saved: dict[str, Any] | None = None, **settings: Any) -> RunLength:
    section = TrainConfig(**{"minutes": 10.0, "batch": 8, "evaluate_every": 1000, "save_every": 1000, **settings})
    layouts: Any = [SimpleNamespace(samples_per_epoch=80)]
    return plan_run_length(section, Batches(layouts, [1.0], BatchSizes(8, section.batch_rampup)), 10, saved)


def timed(
    clock: Clock, length: RunLength, *, first: float, step: float, costs: Costs = NO_COSTS, run: bool = False
) -> list[RunLength]:
    """The length after each step of a run whose first step ends after `first` seconds."""
    timer = MinutesTimer(clock.now, run, 1, SINGLE_PROCESS, log_of(clock), lambda: costs)
    lengths: list[RunLength] = []
    while not length.known:
        clock.now += step if lengths else first
        length = timer.after_step(length, len(lengths) + 1, RESULT)
        lengths.append(length)
    return lengths


def test_fifty_steps_are_timed_and_the_first_is_not(clock: Clock) -> None:
    """10 minutes, a start of 100 s: 500 steps of 1 s follow the first step."""
    lengths = timed(clock, planned(), first=100.0, step=1.0)
    assert len(lengths) == 51
    assert lengths[-1].steps == 501
    assert lengths[-1].describe().startswith("501 steps of 8 samples")
    assert "train.minutes=10" in lengths[0].describe()
    assert not any(length.is_due(7000, done) for done, length in enumerate(lengths[:-1], 1)), "none of them is the last"


def test_evaluations_saves_and_the_end_of_the_command_are_subtracted(clock: Clock) -> None:
    """After 100 + 50 s, 450 s are left: 10 s of evaluations at steps 100 to 400 and at the last, 1 s of saves at 200
    ..."""
    costs = Costs(evaluation=10.0, save=1.0, full_pass=30.0)
    settings = {"evaluate_every": 100, "save_every": 200}
    train_only = timed(clock, planned(**settings), first=100.0, step=1.0, costs=costs)[-1].steps
    # n - 51 + 10 (floor(n / 100) + 1) + floor(n / 200) + 1 <= 450
    assert train_only == 448
    # 30 s for a pass over the valid split and 5 s are kept for evaluate and generate
    assert timed(clock, planned(**settings), first=100.0, step=1.0, costs=costs, run=True)[-1].steps == 413


def test_time_of_evaluations_among_the_timed_steps_is_not_counted_in_a_step(clock: Clock) -> None:
    timer = MinutesTimer(clock.now, False, 1, SINGLE_PROCESS, log_of(clock), lambda: NO_COSTS)
    length, done = planned(), 0
    while not length.known:
        done += 1
        clock.now += 1.0
        length = timer.after_step(length, done, RESULT)
        if done == 20:
            with clock.paused(RESULT):
                clock.now += 49.0
    assert (done, length.steps) == (51, 600 - 49)


def test_a_growing_batch_is_counted_in_tokens(clock: Clock) -> None:
    length = planned(batch_rampup=[2, 3, 6])
    assert length.sizes.size_at(0) < length.sizes.size_at(9)
    steps = fitting_steps(length, 2, 10.0, 80.0, NO_COSTS)
    seconds = [(length.tokens_after(n) - length.tokens_after(2)) / 80 for n in (steps, steps + 1)]
    assert seconds[0] <= 10 < seconds[1]


def test_a_run_does_not_exceed_its_epochs(clock: Clock) -> None:
    """80 samples of an epoch in steps of 8: 25 epochs are 250 steps; 98 s at 80 tokens/s are enough for 98 more."""
    assert fitting_steps(planned(max_epochs=25), 2, 1e6, 80.0, NO_COSTS) == 250
    assert fitting_steps(planned(max_epochs=25), 2, 98.0, 80.0, NO_COSTS) == 100
    assert (
        planned(max_epochs=25).train_with_all_steps.steps
        == planned(max_epochs=25).with_measured_steps(100, 2).train_with_all_steps.steps
        == 250
    )
    assert [planned(minutes=None, max_epochs=2.5, steps=steps).steps for steps in (20, 30)] == [20, 25]


@pytest.mark.parametrize("length", [{"minutes": 10.0}, {"minutes": None, "steps": 1000}])
def test_a_warmup_longer_than_the_epochs_is_refused_before_the_first_step(length: dict[str, Any]) -> None:
    with pytest.raises(TextmillError, match=r"100 is more than the 25 steps of train\..* and train\.max_epochs=2\.5;"):
        planned(warmup=100, max_epochs=2.5, **length)
    assert planned(warmup=25, max_epochs=2.5, **length)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_of_fewer_epochs_than_the_timed_steps_ends_in_time(clock: Clock, steps: int) -> None:
    """An epoch is 10 steps; nothing but the limit ends the timing of steps that take no time."""
    lengths = timed(clock, planned(max_epochs=steps / 10), first=0.0, step=0.0)
    assert (len(lengths), lengths[-1].steps) == (steps, steps)


def test_other_epochs_are_measured_again_and_other_minutes_do_not_exceed_them(clock: Clock) -> None:
    length = timed(clock, planned(max_epochs=25), first=1.0, step=1.0)[-1]
    assert length.steps == 250
    saved = json.loads(json.dumps(length.save_state()))
    assert planned(saved, max_epochs=25).known
    assert not planned(saved, max_epochs=50).known
    again = planned(saved, max_epochs=25, minutes=20.0)
    assert (again.known, again.steps) == (False, 250), "a run at step 250 is finished, however many minutes it gets"


@pytest.mark.parametrize(("step", "timed_steps", "steps"), [(2.0, 30, 300), (30.0, 2, 20), (70.0, 1, 8)])
def test_short_runs_time_a_tenth_of_their_steps(clock: Clock, step: float, timed_steps: int, steps: int) -> None:
    lengths = timed(clock, planned(), first=step, step=step)
    assert (len(lengths) - 1, lengths[-1].steps) == (timed_steps, steps)


def test_after_a_long_start_steps_still_get_a_fifth_of_the_minutes(clock: Clock) -> None:
    lengths = timed(clock, planned(), first=590.0, step=1.0)
    assert lengths[-1].steps == len(lengths) + 120


def test_a_start_longer_than_the_minutes_still_gives_a_model(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """A fifth of half a minute is 6 s; the first step of them is over when the rest is planned."""
    assert timed(clock, planned(minutes=0.5), first=31.0, step=0.1)[-1].steps > 50
    assert "longer than 0.5 min: up to the end of the first step it took 31 s already" in capsys.readouterr().err
    assert timed(clock, planned(minutes=0.5), first=26.0, step=0.1, run=True)[-1].steps > 50


def test_impossible_minutes_are_refused(clock: Clock) -> None:
    with pytest.raises(TextmillError, match=r"train\.minutes: "):
        build_config({"train": {"minutes": 0}})
    with pytest.raises(TextmillError, match=r"train\.warmup: 400 is more than the 300 steps of train\.minutes=10"):
        timed(clock, planned(warmup=400), first=2.0, step=2.0)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "stable", "constant"])
def test_the_learning_rate_has_no_jump_and_ends_at_the_minimum(clock: Clock, schedule: str) -> None:
    lengths = timed(clock, planned(schedule=schedule, warmup=0.05, learning_rate=1.0), first=1.0, step=1.0)
    last = lengths[-1]
    rates = [length.lr_at(step) for step, length in enumerate([planned(warmup=0.05, learning_rate=1.0), *lengths[:-1]])]
    assert rates[4:] == pytest.approx([(step + 1) / 30 if step < 30 else 1.0 for step in range(4, 51)])
    assert [last.lr_at(step) for step in range(4, 51)] == rates[4:], "a resumed run computes the same ones"
    later = [last.lr_at(step) for step in range(50, last.steps + 1)]
    assert max(abs(one - other) for one, other in itertools.pairwise(later)) < 0.02
    assert later[-1] == pytest.approx(1.0 if schedule == "constant" else 0.0)


def test_other_minutes_are_measured_again(clock: Clock) -> None:
    length = timed(clock, planned(warmup=0.05), first=1.0, step=1.0)[-1]
    saved = json.loads(json.dumps(length.save_state()))
    restored = planned(saved)
    assert (restored.train, restored.measured_at) == (length.train, length.measured_at)
    again = planned(saved, minutes=20.0)
    assert not again.known
    assert again.train.warmup == length.train.warmup == 30
    assert planned({}).save_state()["steps"] is None
    assert planned(minutes=None, steps=5).save_state() == {}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    return Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("minutes") / "root"))


def with_minutes(config: RunConfig, minutes: float, **settings: Any) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"minutes": minutes, **settings})})


def test_a_stopped_run_keeps_its_number_of_steps_and_its_losses(
    root: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first run's steps take 1 s, those of the resumed run 7 s; both have the steps that fit into the first's time.

    The weights are averaged, so the checkpoint has averaged and raw weights.
    """
    seconds, real_step = [1.0], OnTorch.train_step

    def step(engine: OnTorch, batch: Any, step: int, lr: float) -> Any:
        clock.now += seconds[0]
        if (step, seconds[0]) == (stop_at[0], 1.0):
            os.kill(os.getpid(), signal.SIGTERM)
        return real_step(engine, batch, step, lr)

    stop_at = [-1]
    monkeypatch.setattr(OnTorch, "train_step", step)
    settings = {"warmup": 0.2, "average": AverageConfig(memory=0.01)}  # 0.01 epochs are more than two steps
    whole, stopped = (with_minutes(config_for(root, root / name, 9), 0.5, **settings) for name in ("whole", "stopped"))
    train(whole)
    assert "train: 29 steps of 8 samples" in capsys.readouterr().out, "30 s, less the time of the last save"
    stop_at[0] = 12
    with pytest.raises(Interrupted):
        train(stopped)
    seconds[0] = 7.0
    train(stopped)
    assert read_metrics(root / "whole") == read_metrics(root / "stopped")
    assert hash_checkpoint(root / "whole", 29) == hash_checkpoint(root / "stopped", 29)
    assert json.loads((root / "stopped/step-0000029/progress.json").read_text())["run_length"]["steps"] == 29
    capsys.readouterr()
    train(stopped)
    assert "done already" in capsys.readouterr().out


TWO_CLOCKS = """
import os, sys
from types import SimpleNamespace
import textmill.cli, textmill.training.timing, textmill.training.validation
from textmill.cli import main
from textmill.engines.on_torch import OnTorch

now, real_step = [0.0], OnTorch.train_step
def step(*arguments):
    now[0] += 1.0 + 2 * int(os.environ["RANK"])
    return real_step(*arguments)
OnTorch.train_step = step
for module in ("cli", "training.timing", "training.validation"):
    sys.modules[f"textmill.{module}"].time = SimpleNamespace(perf_counter=lambda: now[0])
sys.exit(main())
"""


@pytest.mark.long
def test_two_ranks_with_different_clocks_agree(root: Path) -> None:
    words = [word for word in train_arguments(root, root / "two", 1) if word != "train.steps=1"]
    command = [sys.executable, "-c", TWO_CLOCKS, *words, "train.minutes=0.5"]
    assert run_together(command, 2) == "ok"
    assert json.loads((root / "two/step-0000029/progress.json").read_text())["run_length"]["steps"] == 29
