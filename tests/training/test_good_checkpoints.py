"""Good checkpoints are never replaced by bad ones: divergence, wrong or damaged tokens, going back to an earlier
step."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from bench.kill_train import read_metrics
from tests.support.small_models import single_process_snapshot
from tests.support.small_runs import config_for
from textmill.checkpoints.folders import list_checkpoints, open_checkpoint
from textmill.checkpoints.writing import Snapshot
from textmill.errors import TextmillError
from textmill.storage import faults
from textmill.tokens.splits import open_splits
from textmill.track import Trackers
from textmill.training import loop
from textmill.training.divergence import SkippedUpdates
from textmill.training.loop import train
from textmill.training.run_folder import Saver
from textmill.training.run_length import RunLength

LR_AT = RunLength.lr_at
SMALL = ("train.evaluate_batches=1", "train.warmup=0")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    return Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("good") / "root"))


def test_divergence_keeps_the_good_checkpoints_and_ends_the_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(self: RunLength, step: int) -> float:
        return 1e30 if step >= 6 else LR_AT(self, step)

    monkeypatch.setattr(RunLength, "lr_at", explode)
    settings = ("train.clip=0", "train.checkpoints.keep=1", "train.log_every=100", "train.save_every=2", *SMALL)
    with pytest.raises(TextmillError, match=r"diverged: the loss is no longer finite at step (8|9|1\d|2\d);"):
        train(config_for(root, root / "wild", 400, *settings))
    assert list(list_checkpoints(root / "wild")) == [6]
    assert all(np.isfinite(values).all() for _, values in open_checkpoint(root / "wild" / "step-0000006").weights())


def test_a_save_waits_for_the_steps_before_it(tmp_path: Path) -> None:
    """Five skipped updates in a row end the run before the next save, even if the losses are finite."""

    @dataclass
    class Skipped:
        skipped: bool = True
        scale: float | None = None

    updates = SkippedUpdates(tmp_path, True, "float32")
    for step in range(1, 6):
        updates.add(step, Skipped())
    with pytest.raises(TextmillError, match="diverged: the loss is no longer finite at step 5"):
        updates.refuses_save(5, 3.0, {}, last=False, trackers=Trackers())


def test_metrics_are_strict_json(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunLength, "lr_at", lambda self, step: 1e30)
    with pytest.raises(TextmillError, match="diverged"):
        train(config_for(root, root / "nan", 3, "train.clip=0", *SMALL))
    assert not list_checkpoints(root / "nan"), "the last step has no finite loss, so it is no result"

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    text = (root / "nan" / "metrics.jsonl").read_text()
    losses = [
        line["loss"] for line in (json.loads(one, parse_constant=refuse) for one in text.splitlines()) if "loss" in line
    ]
    assert losses[0] > 0
    assert None in losses


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    def snapshot(step: int, value: float) -> Snapshot:
        return single_process_snapshot(step, [("w", np.array([1.0, value], np.float32))], [], {"step": step}, {})

    saver = Saver(tmp_path, keep=1, keep_every=None)
    saver.save(snapshot(1, 2.0))
    saver.save(snapshot(2, math.inf))
    with pytest.raises(TextmillError, match="diverged: step 2 is not saved: a weight is not finite"):
        saver.wait()
    assert list(list_checkpoints(tmp_path)) == [1]


def test_the_store_of_another_split_is_refused(root: Path, tmp_path: Path) -> None:
    wrong = Path(shutil.copytree(root, tmp_path / "wrong"))
    for ending in ("bin", "idx"):
        shutil.copy(wrong / "tokens" / f"valid.{ending}", wrong / "tokens" / f"train.{ending}")
    with pytest.raises(TextmillError, match=r"tokens: train\.(bin|idx) has .* bytes instead of .*; put the file back"):
        train(config_for(wrong, wrong / "run", 6, *SMALL))
    assert not (wrong / "run").exists()


def test_a_changed_id_is_found_during_the_run_and_a_checked_file_is_not_read_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Path(shutil.copytree(root, tmp_path / "wrong"))
    config = config_for(wrong, wrong / "run", 6, *SMALL)
    ids = wrong / "tokens" / "train.bin"
    good = ids.read_bytes()
    ids.write_bytes(good[2:4] + good[:2] + good[4:])
    with pytest.raises(TextmillError, match=r"train\.bin does not match its checksum, so the training data is wrong"):
        train(config)
    assert 6 not in list_checkpoints(wrong / "run")
    ids.write_bytes(good)
    train(config)
    assert set(map(Path, json.loads((wrong / "run" / "tokens_checked.json").read_text()))) == set(
        open_splits(config).files
    )
    monkeypatch.setattr(loop, "find_damage", lambda *_: pytest.fail("a file is read again"))
    train(config_for(wrong, wrong / "run", 7, *SMALL))


def test_going_back_keeps_later_checkpoints_until_the_next_save(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = root / "back"
    config = config_for(root, run, 6, "train.save_every=2", "train.checkpoints.keep=9", *SMALL)
    train(config)
    before, folders = read_metrics(run), list_checkpoints(run)
    assert list(folders) == [2, 4, 6]

    def interrupt(self: RunLength, step: int) -> float:
        if step == 3:
            raise KeyboardInterrupt
        return LR_AT(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(RunLength, "lr_at", interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(config, step=2)
    assert "train: starts again from step 2; the checkpoints of steps 4, 6 are removed when" in capsys.readouterr().out
    assert list_checkpoints(run) == folders
    train(config_for(root, run, 7, "train.save_every=2", "train.checkpoints.keep=9", *SMALL))
    assert read_metrics(run)[: len(before)] == before, "the run resumed from step 6, as if it had not gone back"
    train(config_for(root, run, 5, "train.save_every=2", "train.checkpoints.keep=9", *SMALL), step=2)
    assert list(list_checkpoints(run)) == [2, 4, 5]
    assert not (run / "metrics.replaced.jsonl").exists()


@pytest.mark.parametrize("engine", ["jax", "deepspeed"])
def test_faults_of_the_torch_engine_are_refused_by_others(root: Path, engine: str) -> None:
    pytest.importorskip(engine, reason=f"needs the extra {engine}")
    faults.arm("nan@step:3")
    try:
        with pytest.raises(TextmillError, match=r"TEXTMILL_FAULT: only the torch engine supports nan"):
            train(config_for(root, root / engine, 6, f"engine.kind={engine}"))
    finally:
        faults.arm("")
