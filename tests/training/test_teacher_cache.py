"""Cached teachers: equal to live ones and to transformers, whole after a kill, and refused by runs they do not fit."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bench.kill_train import hash_checkpoint, read_metrics, train_arguments
from tests.support.small_runs import config_for
from tests.support.together import run_together
from textmill.checkpoints.folders import open_model
from textmill.commands.check import check
from textmill.commands.plan import plan
from textmill.config import RunConfig
from textmill.engines.distillation.teachers import teacher_flops
from textmill.errors import TextmillError
from textmill.storage.files import read_json
from textmill.storage.stages import find_stage_damage
from textmill.tokens.batches import teacher_cache as records
from textmill.training.loop import complete_config, prepare_run, train
from textmill.training.teacher_cache import cache_teacher
from textmill.where import open_where

STEPS, TOP_K = 4, 6
EVERY = ["train.log_every=1", "train.warmup=0", "train.save_every=4", "train.evaluate_every=100", "train.seed=7"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    folder = Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("cached") / "root"))
    train(config_for(folder, folder / "run", 20, *EVERY))
    cache_teacher(distilling(folder, "unused"))
    return folder


def settings(root: Path, *changes: str) -> list[str]:
    return [*EVERY, f"train.distil.teachers=[{root / 'run'}]", f"train.distil.top_k={TOP_K}", *changes]


def distilling(root: Path, run: str, *changes: str) -> RunConfig:
    return config_for(root, root / run, STEPS, *settings(root, *changes))


def cached(root: Path, run: str, *changes: str) -> RunConfig:
    return distilling(root, run, f"train.distil.cache={root / 'teacher-cache'}", *changes)


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.[bj]*")}


@pytest.mark.long_with("jax", "deepspeed")
@pytest.mark.parametrize("kind", ["torch", "jax", "deepspeed"])
def test_a_cached_teacher_equals_the_live_one(kind: str, root: Path, tmp_path: Path) -> None:
    same = ["model.shape.dropout=0", "train.optimizer=adamw", "train.learning_rate=1e-3"]
    train(distilling(root, str(tmp_path / "live"), *same))
    train(cached(root, str(tmp_path / "cached"), *same, f"engine.kind={kind}"))
    lines = [[line for line in read_metrics(tmp_path / name) if "loss" in line] for name in ("live", "cached")]
    assert len(lines[0]) == STEPS
    for live, other in zip(*lines, strict=True):
        for name in ("loss", "distil_kl", "grad_norm"):
            assert other[name] == pytest.approx(live[name], rel=1e-6 if kind == "torch" else 1e-4, abs=1e-7), name
    assert lines[0][-1]["distil_kl"] > 0
    assert teacher_flops(cached(root, "cached").train.distil, 64) == 0


def test_records_are_the_predictions_of_transformers(root: Path) -> None:
    from transformers import GPT2LMHeadModel

    config = cached(root, "unused")
    *_, batches, _ = prepare_run(resolved(config), "no", "latest")
    batch = batches.batch_at(1)
    net = GPT2LMHeadModel.from_pretrained(open_model(str(root / "run")).folder).eval()
    with torch.no_grad():
        logits = net(torch.from_numpy(batch.inputs).long()).logits
    wanted = (logits / config.train.distil.temperature).softmax(-1)
    assert batch.teacher_ids is not None
    assert batch.teacher_logs is not None
    found = torch.from_numpy(batch.teacher_logs).exp()
    values, _ = wanted.topk(TOP_K, -1)
    torch.testing.assert_close(found[..., :-1], values, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found[..., -1], 1 - values.sum(-1), rtol=1e-4, atol=1e-6)
    chosen = wanted.gather(-1, torch.from_numpy(batch.teacher_ids).long())
    torch.testing.assert_close(found[..., :-1], chosen, rtol=1e-4, atol=1e-7)


def resolved(config: RunConfig) -> RunConfig:
    from textmill.processes.ranks import SingleProcess

    return complete_config(config, "no", SingleProcess())


@pytest.mark.long
def test_a_kill_leaves_the_same_bytes(root: Path) -> None:
    """Killed at a write in the middle, the same command finishes; the files equal those of an undisturbed one.

    Each in a process of its own: what other tests import can change the last bits of a sum in this one."""
    start = (
        "import sys; from textmill.tokens.batches import teacher_cache; teacher_cache.FILE_BYTES = 1 << 12; "
        "from textmill.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    _, where, *own = train_arguments(root, root / "unused", STEPS)

    def write(name: str, fault: str = "") -> int:
        words = [where, *own, *settings(root, f"train.distil.cache={root / name}")]
        environment = {**os.environ, "TEXTMILL_FAULT": fault, "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.run([sys.executable, "-c", start, "cache-teacher", *words], env=environment).returncode

    assert write("whole") == 0
    names = sorted(path.name for path in (root / "whole").glob("*.bin"))
    assert len(names) > 3
    assert write("killed", "kill@disk:14") == -signal.SIGKILL
    unfinished = [path.name for path in (root / "killed.part").glob("*.bin")]
    assert 0 < len(unfinished) < len(names)
    assert not (root / "killed").exists()
    assert write("killed") == 0
    assert hashes(root / "killed") == hashes(root / "whole")
    assert find_stage_damage(root / "killed") == []


@pytest.mark.long
def test_resumed_and_on_two_processes(root: Path, tmp_path: Path) -> None:
    constant = ["train.schedule=constant", "train.save_every=2", f"train.distil.cache={root / 'teacher-cache'}"]
    train(distilling(root, str(tmp_path / "whole"), *constant))
    for steps in (2, 4):
        train(distilling(root, str(tmp_path / "parts"), *constant, f"train.steps={steps}"))
    assert hash_checkpoint(tmp_path / "parts", 4) == hash_checkpoint(tmp_path / "whole", 4)
    words = [*train_arguments(root, tmp_path / "two", STEPS), *settings(root, *constant)]
    assert run_together([sys.executable, "-m", "textmill", *words], 2) == "ok"
    for one, other in zip(read_metrics(tmp_path / "two"), read_metrics(tmp_path / "whole"), strict=True):
        assert one == {key: pytest.approx(value, rel=2e-5) for key, value in other.items()}


def test_a_disk_that_is_too_small_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(TextmillError, match=r"needs 0.0 GB, and the disk has 0.0 GB free; lower train.distil.top_k"):
        cache_teacher(distilling(root, "unused", f"train.distil.cache={root / 'full'}"))
    assert not (root / "full.part").exists()


def test_a_finished_cache_is_kept(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for steps in (STEPS, STEPS - 1):  # a shorter run needs fewer samples
        cache_teacher(distilling(root, "unused", f"train.steps={steps}"))
        assert "done already" in capsys.readouterr().out
    other = f"train.distil.cache={root / 'other'}"
    cache_teacher(distilling(root, "unused", other))
    cache_teacher(distilling(root, "unused", other, f"train.steps={STEPS - 1}"), force="yes")
    with pytest.raises(TextmillError, match=r"has the predictions of 24 samples, the run needs 32"):
        train(distilling(root, "refused", other))
    capsys.readouterr()
    check(str(root))
    assert "teacher-cache: intact" in capsys.readouterr().out
    _, where, *own = train_arguments(root, root / "run", STEPS)
    check(where, [*own, *EVERY])
    assert "teacher-cache: intact" in capsys.readouterr().out, "of a config too"
    assert plan(cached(root, "unused"))["step_seconds"] > 0
    with pytest.raises(TextmillError, match=r"made from other settings or inputs: train.seed was 7, is 8"):
        cache_teacher(distilling(root, "unused", "train.seed=8"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.seed=8", r"made for another run: train.seed was 7, is 8"),
        ("train.distil.temperature=3", r"train.distil.temperature was 2.0, is 3.0"),
        ("train.packed.isolate_documents=true", r"train.packed.isolate_documents was False, is True"),
        ("train.length=16", r"train.length was \d+, is 16"),
        ("train.steps=5", r"has the predictions of \d+ samples, the run needs \d+; lower train.steps"),
        ("train.epochs=5", r"has the predictions of \d+ samples, the run needs [0-9,]+; lower train.epochs"),
        ("train.minutes=1", r"train.minutes: how many samples the run will see is not known before"),
        ("train.layout=masked", r"train.distil.cache: does not work with train.layout=masked"),
        ("train.distil.cosine=1", r"train.distil.cosine: needs the teachers themselves"),
        ("train.distil.top_k=0", r"set train.distil.top_k to how many"),
        ("train.distil.cache=nothing", r"nothing: no predictions found; write them with: textmill cache-teacher"),
    ],
)
def test_a_cache_of_another_run_is_refused(root: Path, change: str, message: str) -> None:
    _, where, *own = train_arguments(root, root / "refused", STEPS)
    if change.startswith(("train.epochs", "train.minutes")):
        own.remove(f"train.steps={STEPS}")
    more = settings(root, f"train.distil.cache={root / 'teacher-cache'}", change)
    with pytest.raises(TextmillError, match=message):
        train(open_where(where, [*own, *more]).config)
    assert not (root / "refused").exists()


def test_another_batch_size_finds_the_same_samples(root: Path) -> None:
    _, _, batches, _ = prepare_run(resolved(cached(root, "unused", "train.batch=2", "train.steps=6")), "no", "latest")
    _, _, others, _ = prepare_run(resolved(cached(root, "unused")), "no", "latest")
    one, other = batches.batch_at(2), others.batch_at(0)
    rows = [other.samples.tolist().index(number) for number in one.samples.tolist()]
    assert one.teacher_ids is not None
    assert other.teacher_ids is not None
    np.testing.assert_array_equal(one.teacher_ids, other.teacher_ids[rows])


def test_predictions_of_other_tokens_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, batches, _ = prepare_run(resolved(cached(root, "unused")), "no", "latest")
    assert batches.teacher is not None
    batch = batches.samples_at(np.arange(4))
    batch.inputs[2, 0] ^= 1
    with pytest.raises(TextmillError, match=r"sample 2 of this run has other tokens than the teachers read"):
        batches.teacher.attach(batch)


def test_settings_that_cannot_be_cached(root: Path) -> None:
    with pytest.raises(TextmillError, match=r"train.distil.top_k: is 0; set how many tokens to keep"):
        cache_teacher(distilling(root, "unused", "train.distil.top_k=0"))
    with pytest.raises(TextmillError, match=r"train.distil.teachers: there are none to cache"):
        cache_teacher(config_for(root, root / "unused", 8))
    config = distilling(root, "unused")
    minutes = config.train.model_copy(update={"minutes": 1.0})
    with pytest.raises(TextmillError, match=r"train.minutes: how many samples the run will see is not known"):
        cache_teacher(config.model_copy(update={"train": minutes}))
    masked = config.train.model_copy(update={"layout": "masked"})
    with pytest.raises(TextmillError, match=r"train.distil.cache: does not work with train.layout=masked"):
        cache_teacher(config.model_copy(update={"train": masked}))


def test_what_cannot_be_cached_leaves_nothing_behind(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    for changes, message in (
        (["train.distil.top_k=5000"], r"train.distil.top_k: 5,000 are not fewer than the vocabulary's \d+ tokens"),
        (
            ["model.shape.positions=2048", "train.length=2048"],
            r"has \d+ positions, samples have 2,048 tokens; lower train.length",
        ),
    ):
        with pytest.raises(TextmillError, match=message):
            cache_teacher(distilling(root, "unused", f"train.distil.cache={folder}", *changes))
        assert not [*tmp_path.iterdir()]
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(TextmillError, match=r"exists and was not made by 'textmill cache-teacher'"):
        cache_teacher(distilling(root, "unused", f"train.distil.cache={folder}"))


def test_damaged_predictions_are_refused(root: Path, tmp_path: Path) -> None:
    """An id beyond the vocabulary when it is read, any other byte by the checksum, before anything is saved."""
    folder = Path(shutil.copytree(root / "teacher-cache", tmp_path / "cache"))
    config = distilling(root, str(tmp_path / "run"), f"train.distil.cache={folder}")
    *_, batches, _ = prepare_run(resolved(config), "no", "latest")
    assert batches.teacher is not None
    assert read_json(folder / "manifest.json")["made_from"]["exact"]
    path = folder / records.file_name(0)
    rows = np.fromfile(path, batches.teacher.record)
    before, rows["ids"][0, 3, 2] = rows.copy(), 65_535
    rows.tofile(path)
    with pytest.raises(TextmillError, match=r"has the token 65,535, and the vocabulary \d+ tokens; a file is damaged"):
        batches.batch_at(0)
    before["logs"][0, 3, 2] -= 1
    before.tofile(path)
    with pytest.raises(TextmillError, match=r"not match its checksum.* make it again with: textmill cache-teacher"):
        train(config)
    assert not [*(tmp_path / "run").glob("step-*")]
    path.unlink()
    low = distilling(root, "unused", f"train.distil.cache={folder}", "engine.precision=bf16")
    cache_teacher(low, force="changed")
    assert not read_json(folder / "manifest.json")["made_from"]["exact"], "written again in bf16"
