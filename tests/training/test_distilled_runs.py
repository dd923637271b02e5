"""A run with teachers: resumed bitwise, equal on two processes, and refused with teachers that do not belong to it."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest

from bench.kill_train import hash_checkpoint, read_metrics, train_arguments
from tests.support.model_folders import korean_tokenizer, write_folder
from tests.support.small_runs import config_for
from tests.support.together import run_together
from textmill.checkpoints.folders import open_model
from textmill.commands.run import second_generation
from textmill.engines.distillation import teacher_flops
from textmill.errors import TextmillError
from textmill.training.loop import train
from textmill.training.start import check_start
from textmill.where import open_where

EVERY = [
    "train.log_every=1",
    "train.save_every=3",
    "train.evaluate_every=6",
    "train.schedule=constant",
    "train.warmup=0",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    folder = Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("distil") / "root"))
    train(config_for(folder, folder / "teacher", 6, *EVERY))
    return folder


def terms(root: Path, *teachers: str) -> list[str]:
    names = ",".join(teachers or [str(root / "teacher")])
    return [*EVERY, f"train.distil.teachers=[{names}]", "train.distil.cosine=0.5", "train.seed=7"]


def test_a_resumed_run_is_bitwise_the_same(root: Path) -> None:
    train(config_for(root, root / "whole", 6, *terms(root)))
    train(config_for(root, root / "parts", 3, *terms(root)))
    train(config_for(root, root / "parts", 6, *terms(root)))
    assert hash_checkpoint(root / "parts", 6) == hash_checkpoint(root / "whole", 6)
    last = [line for line in read_metrics(root / "whole") if "loss" in line][-1]
    assert {"distil_kl", "distil_cosine"} < last.keys()
    assert last["distil_kl"] > 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("count", "mesh", "more"),
    [
        (2, [], []),
        (2, ["engine.mesh.shard=2"], []),
        (2, ["engine.mesh.tensor=2"], ["train.distil.mse=0.001", "train.label_smoothing=0.1"]),
        (4, ["engine.mesh.tensor=2", "engine.mesh.shard=2"], ["train.distil.kl=0.7"]),
        (2, ["engine.mesh.shard=2"], ["train.distil.hidden=0.3", "train.freeze=[wpe]"]),
        (2, ["engine.kind=deepspeed", "engine.zero=2"], ["train.distil.hidden=0.3"]),
        (2, ["engine.kind=deepspeed", "engine.zero=3"], ["train.distil.hidden=0.3", "train.distil.mse=0.001"]),
    ],
)
def test_processes_equal_one(count: int, mesh: list[str], more: list[str], root: Path, tmp_path: Path) -> None:
    train(config_for(root, tmp_path / "alone", 6, *terms(root), *more))
    words = train_arguments(root, tmp_path / "two", 6)
    assert run_together([sys.executable, "-m", "textmill", *words, *terms(root), *more, *mesh], count) == "ok"
    for one, other in zip(read_metrics(tmp_path / "two"), read_metrics(tmp_path / "alone"), strict=True):
        assert one == {key: pytest.approx(value, rel=2e-5) for key, value in other.items()}


def test_adapters_on_the_teacher_start_without_a_difference(root: Path) -> None:
    """New adapters add nothing, so the first predictions are the teacher's: no divergence, cosine 1."""
    adapters = [f"model.init_from={root / 'teacher'}", "model.lora.rank=2", "model.shape.dropout=0"]
    train(config_for(root, root / "adapters", 3, *terms(root), *adapters, "train.learning_rate=0.01"))
    first, *_, last = [line for line in read_metrics(root / "adapters") if "loss" in line]
    assert first["distil_kl"] == pytest.approx(0, abs=1e-6)
    assert first["distil_cosine"] == pytest.approx(0, abs=1e-5)
    assert last["distil_kl"] > 1e-5


def test_the_second_generation_that_is_proposed(root: Path) -> None:
    """The command that `run` prints trains the same model with the first run as its teacher."""
    command, *settings = shlex.split(second_generation(shlex.quote(str(root)), str(root / "teacher")))[1:]
    assert (command, settings[0]) == ("run", str(root))
    train(config_for(root, root / "unused", 3, *EVERY, *settings[1:]))
    found = read_metrics(root / "teacher-2")[0]
    assert found["distil_kl"] > 0
    assert not (root / "unused").exists()


def test_another_teacher_is_another_run(root: Path) -> None:
    train(config_for(root, root / "first", 3, *terms(root)))
    other = Path(shutil.copytree(open_model(str(root / "teacher")).folder, root / "other"))
    train(config_for(root, root / "first", 6, *terms(root, str(other))))  # the same weights elsewhere
    shutil.rmtree(other)
    train(config_for(root, root / "second", 3, *EVERY))
    with pytest.raises(TextmillError, match=r"other settings or inputs: train.distil.teachers was"):
        train(config_for(root, root / "first", 9, *terms(root, str(root / "second"))))


def test_teachers_of_other_tokenizers_and_engines_are_refused(root: Path, tmp_path: Path) -> None:
    stranger = write_folder(tmp_path / "stranger", korean_tokenizer())
    with pytest.raises(TextmillError, match=r"stranger has another tokenizer than this run"):
        train(config_for(root, root / "none", 3, *terms(root, str(stranger))))
    bert = ["model.family=bert", "model.size=tiny", "train.layout=masked"]
    with pytest.raises(TextmillError, match=r"teacher is a gpt2, which predicts the next token, and the model masked "):
        check_start(open_where("own-text", [*bert, f"train.distil.teachers=[{root / 'teacher'}]"]).config)
    for other in ("engine.mesh.tensor=2", "engine.activation_checkpointing=1"):
        with pytest.raises(TextmillError, match=rf"train.distil.hidden: does not work with {other}"):
            check_start(config_for(root, root / "none", 3, *terms(root), "train.distil.hidden=1", other))
    with pytest.raises(TextmillError, match=r"the JAX engine has no distillation; set engine.kind=torch, or remove it"):
        config_for(root, root / "none", 3, *terms(root), "engine.kind=jax")
    with pytest.raises(TextmillError, match=r"no such|not found|is not"):
        check_start(config_for(root, root / "none", 3, *terms(root, str(tmp_path / "nothing"))))
    assert not (root / "none").exists()


def test_the_teachers_forward_pass_counts(root: Path) -> None:
    config = config_for(root, root / "none", 3, *terms(root, str(root / "teacher"), str(root / "teacher")))
    one = teacher_flops(config_for(root, root / "none", 3, *terms(root)).train.distil, 64)
    assert teacher_flops(config.train.distil, 64) == pytest.approx(2 * one)
    assert one > 0
