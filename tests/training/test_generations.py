"""Several generations in one command: each is taught by the one before, finished ones are kept, killed ones resume."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

import textmill
from bench import kill_train
from bench.kill_train import hash_checkpoint, read_metrics, train_arguments
from tests.support.small_runs import config_for
from textmill.checkpoints.folders import open_model
from textmill.cli import main
from textmill.commands.run import run
from textmill.errors import TextmillError
from textmill.reports.run_files import find_run
from textmill.storage import faults
from textmill.training import loop
from textmill.training.generations import split_generations, train
from textmill.where import open_where

STEPS = 6
EVERY = ["train.log_every=1", "train.save_every=2", "train.evaluate_every=6", "train.warmup=0"]
TWO = [*EVERY, "train.generations=2"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    return Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("generations") / "root"))


@pytest.fixture(scope="module")
def whole(root: Path) -> Path:
    return train(config_for(root, root / "whole", STEPS, *TWO))


def test_the_second_generation_is_a_run_whose_teacher_is_the_first(root: Path, whole: Path, tmp_path: Path) -> None:
    """The same bits as two ordinary runs, and what opens the run folder finds the last one."""
    loop.train(config_for(root, root / "first", STEPS, *EVERY))
    loop.train(
        config_for(root, root / "second", STEPS, *EVERY, f"train.distil.teachers=[{root / 'first'}]", "train.seed=1235")
    )
    assert hash_checkpoint(whole / "generation-1", STEPS) == hash_checkpoint(root / "first", STEPS)
    assert hash_checkpoint(whole, STEPS) == hash_checkpoint(root / "second", STEPS)
    assert read_metrics(whole)[0]["distil_kl"] > 0
    assert open_model(str(whole)).folder.parent == whole
    opened = open_where(str(whole), []).config
    assert (opened.train.generations, opened.train.seed) == (1, 1235)
    assert opened.train.distil.teachers == [str(open_model(str(whole / "generation-1")).folder)]
    (tmp_path / "project.yaml").write_text(config_for(root, whole, STEPS, *TWO).to_yaml(), encoding="utf-8")
    by_project, by_run = textmill.open(tmp_path / "project.yaml").batch(3), textmill.open(whole).batch(3)
    assert (by_project.inputs == by_run.inputs).all()


@pytest.mark.parametrize("at", [3, STEPS + 3])
def test_a_killed_generation_resumes_and_a_finished_one_is_not_trained_again(
    at: int, root: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`at`: the step, counted over both generations, that is not reached at first."""
    config = config_for(root, root / f"killed-{at}", STEPS, *TWO)
    folder = config.folder_of("train")
    steps: list[int | str] = []

    def record(step: int | str) -> None:
        if step != "start":
            steps.append(step)

    def die(step: int | str) -> None:
        record(step)
        if len(steps) > at:
            raise RuntimeError("killed")

    monkeypatch.setattr(faults, "break_process", die)
    with pytest.raises(RuntimeError, match="killed"):
        train(config)
    first = folder / "generation-1"
    assert find_run(str(folder)) == (folder if at > STEPS else first)
    finished = hash_checkpoint(first, STEPS) if at > STEPS else ""
    steps.clear()
    monkeypatch.setattr(faults, "break_process", record)
    train(config)
    assert steps == ([*range(2, STEPS)] if at > STEPS else [*range(2, STEPS), *range(STEPS)])
    assert finished in ("", hash_checkpoint(first, STEPS))
    assert hash_checkpoint(folder, STEPS) == hash_checkpoint(whole, STEPS)
    assert read_metrics(folder) == read_metrics(whole)
    capsys.readouterr()
    steps.clear()
    train(config)
    assert not steps
    assert "generation 2 of 2" in (printed := capsys.readouterr().out)
    assert "done already" in printed


def test_a_forced_run_that_is_killed_goes_on_without_force(
    root: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(root, Path(shutil.copytree(whole, root / "forced-and-killed")), STEPS, *TWO)

    def die(step: int | str) -> None:
        if step == 3:
            raise RuntimeError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(faults, "break_process", die)
        with pytest.raises(RuntimeError, match="killed"):
            train(config, "yes")
    assert hash_checkpoint(train(config), STEPS) == hash_checkpoint(whole, STEPS)


@pytest.mark.long
def test_a_command_killed_in_each_generation_gives_the_same_bits(root: Path, whole: Path) -> None:
    folder = root / "really-killed"
    words = [*train_arguments(root, folder, STEPS), *TWO]
    for fault in ("kill@step:3", "kill@disk:60", "kill@step:5", "kill@step:4"):
        done = kill_train.textmill(*words, env={**os.environ, "TEXTMILL_FAULT": fault})
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
    assert kill_train.textmill(*words).returncode == 0
    assert hash_checkpoint(folder, STEPS) == hash_checkpoint(whole, STEPS)


def test_changed_settings_are_refused_and_force_trains_all_generations_again(root: Path, whole: Path) -> None:
    folder = Path(shutil.copytree(whole, root / "forced"))
    changed = config_for(root, folder, STEPS, *TWO, "train.learning_rate=1e-3")
    with pytest.raises(TextmillError, match=r"other settings or inputs: .*train.learning_rate was 0.003, is 0.001"):
        train(changed)
    train(changed, "changed")
    assert hash_checkpoint(folder / "generation-1", STEPS) != hash_checkpoint(whole / "generation-1", STEPS)
    assert read_metrics(folder) != read_metrics(whole)
    train(changed, "yes")  # all again, with the same bits
    longer = config_for(root, folder, STEPS + 2, *TWO, "train.learning_rate=1e-3")
    train(longer)  # more steps are for the last generation: another first one would be another teacher
    assert not (folder / "generation-1" / f"step-{STEPS + 2:07d}").exists()
    assert (folder / f"step-{STEPS + 2:07d}").exists()


def test_a_run_without_generations_does_not_become_the_last_of_two(root: Path) -> None:
    plain = config_for(root, root / "plain", STEPS, *EVERY)
    train(plain)
    with pytest.raises(TextmillError, match=r"train.generations: .*/plain has checkpoints, but .*/generation-1 has n"):
        train(config_for(root, root / "plain", STEPS, *TWO))
    assert not (root / "plain" / "generation-1").exists()


def test_generations_share_the_minutes(root: Path) -> None:
    """Of three, the first gets a fifth, each other one two: of the whole, or of what is left when it begins."""
    config = config_for(root, root / "none", STEPS, *EVERY, "train.generations=3")
    config = config.model_copy(update={"train": config.train.model_copy(update={"minutes": 10.0})})
    first, second, third = (one.train.minutes for one in split_generations(config))
    assert (first, second, third) == (pytest.approx(2), pytest.approx(5), pytest.approx(10))


@pytest.mark.parametrize("generations", [2, 3])
def test_each_generation_begins_with_its_share_of_the_time_that_is_left(
    generations: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command of 10 minutes, of which 1 is over before training: the last generation ends with the command."""
    now = 60.0
    ends: list[float] = []

    def trains(config, *_given, started, evaluates, **_more):  # type: ignore[no-untyped-def]
        nonlocal now
        now = started + 60 * config.train.minutes
        ends.append(now)
        assert evaluates == (len(ends) == generations)

    config = config_for(root, root / "none", STEPS, *EVERY, f"train.generations={generations}")
    config = config.model_copy(update={"train": config.train.model_copy(update={"minutes": 10.0})})
    monkeypatch.setattr("textmill.training.generations.loop.train", trains)
    monkeypatch.setattr("textmill.training.generations.time.perf_counter", lambda: now)
    train(config, started=0.0, evaluates=True)
    part = 540 / (2 * generations - 1)
    assert ends == pytest.approx([60 + part * (2 * number + 1) for number in range(generations)])
    # Begun again after the first generation, which took its share: the others have theirs.
    whole = ends[-1]
    ends[:] = ends[:1]
    now = 0.0
    monkeypatch.setattr("textmill.training.generations._first_unfinished", lambda _: 2)
    train(config, started=0.0, evaluates=True)
    assert ends[-1] == pytest.approx(600 * (2 * generations - 2) / (2 * generations - 1))
    assert ends[-1] < whole


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            ["model.family=bert", "model.size=tiny", "train.layout=masked"],
            "does not work with train.layout=masked; remove",
        ),
        (["engine.kind=jax"], "the JAX engine has no distillation; set engine.kind=torch"),
        (["engine.mesh.pipeline=2"], "does not work with engine.mesh.pipeline; remove"),
        (["train.distil.teachers=[elsewhere]"], "does not work with train.distil.teachers; remove"),
    ],
)
def test_what_cannot_be_taught_is_refused(
    settings: list[str], reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["quickstart", f"folder={tmp_path / 'x'}", "train.generations=2", *settings]
    for command in ("train", "run"):
        assert main([command, *words]) == 2
        assert f"train.generations: {reason}" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_loop_of_the_users_own_trains_one_generation(root: Path) -> None:
    with pytest.raises(TextmillError, match=r"train.generations: a loop of your own trains one of them"):
        textmill.open_training(config_for(root, root / "none", STEPS, *TWO))


def test_several_processes_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for command in (train, run):
        with pytest.raises(TextmillError, match=r"train.generations: found 2 processes; start it without a launcher"):
            command(config_for(root, root / "none", STEPS, *TWO))
