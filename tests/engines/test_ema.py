"""`train.ema_window`: the average of the weights of all steps is evaluated and saved; training is not changed."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from bench.kill_train import read_metrics, train_arguments
from tests.support.engine_runs import LORA, VOCAB, batch_of, config_of, run, started
from tests.support.together import run_together
from textmill.config import TrainConfig
from textmill.config.load import build_config
from textmill.engines import Engine, open_engine
from textmill.errors import TextmillError
from textmill.models import open_family

WINDOW = 3.0


def raw_of(engine: Engine) -> dict[str, Any]:
    return {name.removeprefix("raw/"): values for name, values in engine.optimizer_state() if name.startswith("raw/")}


@pytest.mark.parametrize(
    "settings", [{"optimizer": "adamw"}, {"optimizer": "muon"}, {"lora": LORA}], ids=["adamw", "muon", "lora"]
)
def test_the_average_is_the_sum_over_all_steps(settings: dict[str, Any]) -> None:
    """After n steps, weights that are k steps old count by (2/3)^k, divided by the sum of all these factors."""
    engine = started(config_of("torch", ema_window=WINDOW, **settings))
    plain = started(config_of("torch", **settings))
    recorded, losses = [], []
    for step in range(6):
        losses += run(engine, range(step, step + 1))
        recorded.append(raw_of(engine))
        engine.eval_step(batch_of(step))  # puts the averaged weights into the net; the next step trains the raw ones
    assert losses == run(plain, range(6)), "training does not depend on the average"
    factors = np.array([(1 - 1 / WINDOW) ** (5 - step) for step in range(6)])
    saved = dict(engine.weights())
    assert saved.keys() == recorded[0].keys()
    for name, values in saved.items():
        wanted = np.tensordot(factors / factors.sum(), np.stack([one[name] for one in recorded]).astype(np.float64), 1)
        np.testing.assert_allclose(values, wanted, rtol=2e-6, atol=1e-7, err_msg=name)
    assert raw_of(engine).keys() == dict(plain.weights()).keys()
    for name, values in plain.weights():
        assert np.array_equal(raw_of(engine)[name], values), name


def test_the_averaged_weights_are_evaluated() -> None:
    config = config_of("torch", ema_window=WINDOW)
    engine, other = started(config), started(config_of("torch"))
    run(engine, range(4))
    other.load(engine.weights(), [], 0, "the average")
    assert engine.eval_step(batch_of(9)).loss == other.eval_step(batch_of(9)).loss
    before = {name: values.copy() for name, values in engine.weights()}
    engine.eval_step(batch_of(9))
    assert all(np.array_equal(before[name], values) for name, values in engine.weights()), "evaluation changes nothing"


def test_the_first_average_is_the_first_weights() -> None:
    engine = started(config_of("torch", ema_window=1000.0))
    run(engine, range(1))
    for name, values in engine.weights():
        np.testing.assert_allclose(values, raw_of(engine)[name], rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_engine_with_an_average_resumes_bitwise(optimizer: str) -> None:
    config = config_of("torch", dropout=0.1, optimizer=optimizer, ema_window=WINDOW)
    straight = started(config)
    run(straight, range(4))
    straight.eval_step(batch_of(4))  # a save often follows an evaluation
    weights, moments = list(straight.weights()), list(straight.optimizer_state())
    again = open_engine(config.engine, config.train, open_family("gpt2").shape_of(config.model, vocab=VOCAB, eos_id=0))
    again.load(weights, moments, straight.updates(), "saved")
    assert run(again, range(4, 8)) == run(straight, range(4, 8))
    for (name, one), (_, other) in zip(straight.weights(), again.weights(), strict=True):
        assert np.array_equal(one, other), name


@pytest.mark.parametrize(("kind", "name"), [("jax", "JAX"), ("deepspeed", "DeepSpeed")])
def test_other_engines_refuse_it_by_name(kind: str, name: str) -> None:
    with pytest.raises(TextmillError, match=rf"train\.ema_window: the {name} engine does not average weights"):
        build_config({"engine": {"kind": kind}, "train": {"ema_window": 0.15}})


def test_the_window_is_in_epochs_or_in_steps() -> None:
    assert TrainConfig(ema_window=0.15).ema_steps(200) == pytest.approx(30)
    assert TrainConfig(ema_window=10.0).ema_steps(200) == 10
    assert TrainConfig().ema_steps(200) is None


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    """A folder with tokens, in which one process has trained the run `alone`."""
    root = Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("averaged") / "root"))
    train_averaged(root, "alone", 1)
    return root


def train_averaged(root: Path, name: str, count: int, *words: str) -> None:
    more = ["train.ema_window=10", "train.schedule=constant", "engine.micro_batch=4", *words]
    command = [sys.executable, "-m", "textmill", *train_arguments(root, root / name, 10), *more]
    assert run_together(command, count) == "ok"


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["shard", "tensor"])
def test_shards_are_averaged_as_full_weights_are(mesh: str, averaged: Path) -> None:
    train_averaged(averaged, mesh, 2, f"engine.mesh.{mesh}=2")
    for one, other in zip(read_metrics(averaged / "alone"), read_metrics(averaged / mesh), strict=True):
        assert one == {name: pytest.approx(value, rel=2e-5) for name, value in other.items()}
    weights, others = (
        load_file(averaged / name / "step-0000010" / "model.safetensors")
        | load_file(averaged / name / "step-0000010" / "optimizer.safetensors")
        for name in ("alone", mesh)
    )
    assert weights.keys() == others.keys()
    for name, values in weights.items():
        np.testing.assert_allclose(values, others[name], rtol=1e-3, atol=2e-5, err_msg=name)
