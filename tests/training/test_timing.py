"""`train.minutes` becomes a number of steps that a resumed run keeps; the log has the throughput of finished steps."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.kill_train import hash_checkpoint, read_metrics, train_arguments
from tests.support.small_runs import config_for
from tests.support.together import run_together
from textmill.config import RunConfig, TrainConfig
from textmill.config.load import build_config
from textmill.engines.on_torch import OnTorch
from textmill.errors import Interrupted, TextmillError
from textmill.processes.ranks import SINGLE_PROCESS
from textmill.tokens.batches.blend import BatchSizes
from textmill.training.loop import train
from textmill.training.run_length import RunLength, plan_run_length
from textmill.training.timing import Costs, MinutesTimer, StepLog, fitting_steps


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
    return plan_run_length(section, BatchSizes(8, section.batch_rampup), 80, 10, saved)


def timed(
    clock: Clock,
    length: RunLength,
    *,
    first: float,
    step: float | Callable[[float], float],
    costs: Costs = NO_COSTS,
    run: bool = False,
) -> list[RunLength]:
    """The length after each step of a run whose first step ends after `first` seconds; `step`: the seconds of a later
    one, or those of one that begins so many seconds after the start."""
    started = clock.now
    timer = MinutesTimer(started, run, 1, SINGLE_PROCESS, log_of(clock), lambda: costs)
    lengths: list[RunLength] = []
    while len(lengths) < length.steps:
        seconds = step(clock.now - started) if callable(step) else step
        clock.now += seconds if lengths else first
        length = timer.after_step(length, len(lengths) + 1, RESULT)
        lengths.append(length)
    return lengths


def test_the_first_step_is_not_timed(clock: Clock) -> None:
    """10 minutes, a start of 100 s: 500 steps of 1 s follow the first step; there is a number after three of them."""
    lengths = timed(clock, planned(), first=100.0, step=1.0)
    assert [length.known for length in lengths[:5]] == [False, False, False, True, True]
    assert {length.steps for length in lengths[3:]} == {501}
    assert lengths[-1].describe().startswith("501 steps of 8 samples")
    assert "train.minutes=10" in lengths[0].describe()
    assert not any(length.is_due(7000, done) for done, length in enumerate(lengths[:-1], 1)), "none of them is the last"


BUSY = {
    "first third": lambda now: 1.0 if now < 200 else 0.05,
    "middle third": lambda now: 1.0 if 200 <= now < 400 else 0.05,
    "last third": lambda now: 1.0 if now > 400 else 0.05,
    "start": lambda now: 1.0 if now < 35 else 0.05,
}


@pytest.mark.parametrize("busy", BUSY)
def test_another_program_costs_its_own_time_only(clock: Clock, busy: str) -> None:
    """Steps take 20 times as long meanwhile. The run still ends in time, after as many steps as could be done, and the
    learning rate has fallen to its end without a jump."""
    settings = {"learning_rate": 1.0, "warmup": 0.05}
    possible, now = 0, 0.0
    while now < 600:
        now += BUSY[busy](now)
        possible = possible + 1
    started = clock.now
    lengths = timed(clock, planned(**settings), first=BUSY[busy](0.0), step=BUSY[busy])
    assert 570 <= clock.now - started <= 603
    assert 0.95 * possible <= len(lengths) <= possible
    rates = [length.lr_at(step) for step, length in enumerate([planned(**settings), *lengths[:-1]])]
    assert min(rates[-3:]) < 1e-3
    decays = rates[len(rates) - rates[::-1].index(max(rates)) :]
    assert all(0 <= one - other < 0.02 for one, other in itertools.pairwise(decays))
    evaluations = Costs(evaluation=40.0 * BUSY[busy](0.0), save=0.0, full_pass=0.0)
    again = timed(clock, planned(evaluate_every=2000, **settings), first=1.0, step=BUSY[busy], costs=evaluations)
    assert len(again) > 0.85 * possible, "evaluations are not taken for slow because they were slow at first"


def test_evaluations_saves_and_the_end_of_the_command_are_subtracted(clock: Clock) -> None:
    """After 100 + 3 s, 497 s are left: 10 s of evaluations at steps 100 to 400 and at the last, 1 s of saves at 200
    ..."""
    costs = Costs(evaluation=10.0, save=1.0, full_pass=30.0)
    settings = {"evaluate_every": 100, "save_every": 200}

    def first_estimate(run: bool) -> int:
        return timed(clock, planned(**settings), first=100.0, step=1.0, costs=costs, run=run)[3].steps

    # n - 4 + 10 (floor(n / 100) + 1) + floor(n / 200) + 1 <= 497
    assert first_estimate(run=False) == 448
    # 30 s for a pass over the valid split and 5 s are kept for evaluate and generate
    assert first_estimate(run=True) == 413


def test_time_of_evaluations_among_the_timed_steps_is_not_counted_in_a_step(clock: Clock) -> None:
    timer = MinutesTimer(clock.now, False, 1, SINGLE_PROCESS, log_of(clock), lambda: NO_COSTS)
    length, done = planned(), 0
    while done < length.steps:
        done += 1
        clock.now += 1.0
        length = timer.after_step(length, done, RESULT)
        if done == 20:
            with clock.paused(RESULT):
                clock.now += 49.0
    assert done == 600 - 49


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


@pytest.mark.parametrize(("step", "timed_steps", "steps"), [(2.0, 3, 300), (30.0, 2, 20), (70.0, 1, 8)])
def test_short_runs_time_a_tenth_of_their_steps(clock: Clock, step: float, timed_steps: int, steps: int) -> None:
    lengths = timed(clock, planned(), first=step, step=step)
    assert [length.known for length in lengths].index(True) == timed_steps
    assert len(lengths) == steps


def test_after_a_long_start_steps_still_get_a_fifth_of_the_minutes(clock: Clock) -> None:
    assert len(timed(clock, planned(), first=590.0, step=1.0)) == 4 + 120


def test_a_start_longer_than_the_minutes_still_gives_a_model(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """A fifth of half a minute is 6 s."""
    assert len(timed(clock, planned(minutes=0.5), first=31.0, step=0.1)) > 50
    assert "longer than 0.5 min: up to the end of the first step it took 31 s already" in capsys.readouterr().err
    assert len(timed(clock, planned(minutes=0.5), first=26.0, step=0.1, run=True)) > 50


def test_impossible_minutes_are_refused(clock: Clock) -> None:
    with pytest.raises(TextmillError, match=r"train\.minutes: "):
        build_config({"train": {"minutes": 0}})
    with pytest.raises(TextmillError, match=r"train\.warmup: 400 is more than the 300 steps of train\.minutes=10"):
        timed(clock, planned(warmup=400), first=2.0, step=2.0)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "stable", "constant"])
def test_the_learning_rate_has_no_jump_and_ends_at_the_minimum(clock: Clock, schedule: str) -> None:
    """Steps become twice as fast in the middle of the run: 300 + 600."""
    settings = {"schedule": schedule, "warmup": 0.05, "learning_rate": 1.0}
    lengths = timed(clock, planned(**settings), first=1.0, step=lambda now: 1.0 if now < 300 else 0.5)
    last = lengths[-1]
    assert last.steps == pytest.approx(900, abs=5)
    rates = [length.lr_at(step) for step, length in enumerate([planned(**settings), *lengths[:-1]])]
    assert rates[4:30] == pytest.approx([(step + 1) / 30 for step in range(4, 30)])
    assert max(abs(one - other) for one, other in itertools.pairwise(rates[4:])) < 0.04
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.0, abs=0.01)
    restored = planned(json.loads(json.dumps(last.save_state())), **settings)
    later = range(850, last.steps)
    assert [restored.lr_at(step) for step in later] == [last.lr_at(step) for step in later], "a resumed run has them"


def test_other_minutes_are_measured_again(clock: Clock) -> None:
    length = timed(clock, planned(warmup=0.05), first=1.0, step=1.0)[-1]
    saved = json.loads(json.dumps(length.save_state()))
    restored = planned(saved)
    assert (restored.train, restored.decay_start) == (length.train, length.decay_start)
    again = planned(saved, minutes=20.0)
    assert not again.known
    assert again.lr_at(29) == length.lr_at(29) > length.lr_at(28), "the same warm-up"
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
    settings = {"warmup": 0.2, "ema_window": 0.01}  # 0.01 epochs are more than two steps
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


@dataclass
class Device:
    """A fake device that computes its steps in order, 2 s each; the clock advances when the host waits, or by hand."""

    now: float = 0.0
    busy: float = 0.0
    reported: list[tuple[int, float]] = field(default_factory=list)

    def step(self) -> Result:
        self.busy = max(self.busy, self.now) + 2.0
        return Result(self, self.busy)


@dataclass
class Result:
    device: Device
    end: float

    @property
    def ready(self) -> bool:
        return self.device.now >= self.end

    @property
    def loss(self) -> float:
        self.device.now = max(self.device.now, self.end)
        return 1.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr("textmill.training.timing.time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def new_log(device: Device) -> Any:
    run_length: Any = SimpleNamespace(tokens_after=lambda done: 400 * done)
    return StepLog(run_length, 0, lambda done, result, rate: device.reported.append((done, rate)))


def test_throughput_includes_the_wait_for_the_device(device: Device) -> None:
    """The host queues ten steps before the device finishes one; 400 tokens in 2 s are 200 per second."""
    log = new_log(device)
    results = [device.step() for _ in range(10)]
    log.add(10, results[-1])
    assert device.reported == [], "its loss is not ready"
    device.step()
    log.flush()
    assert device.reported == [(10, pytest.approx(200.0))]
    assert device.now == 20.0, "the next step was not waited for"


def test_a_ready_step_is_reported_at_once(device: Device) -> None:
    log, result = new_log(device), device.step()
    device.now = 4.0
    log.add(1, result)
    assert device.reported == [(1, pytest.approx(100.0))]
    log.flush()
    assert len(device.reported) == 1


def test_a_pause_starts_after_the_step_and_is_not_counted(device: Device) -> None:
    log = new_log(device)
    results = [device.step(), device.step()]
    log.add(1, results[0])
    with log.paused(results[1]):
        assert device.reported == [(1, pytest.approx(200.0))]
        assert device.now == 4.0
        device.now += 50.0
    log.add(3, device.step())
    log.flush()
    assert device.reported[1:] == [(3, pytest.approx(200.0))]
