"""Local SGD: two workers against an outer step in numpy over engines of one process; traffic; resumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import local_sgd_process
from tests.support.fake_meshes import Collectives, batch_of_rank, shape_of
from tests.support.fake_meshes import config_of as fake_config
from tests.support.fake_meshes import started as fake_started
from tests.support.layout_process import ROWS, config_of, started, state_of
from tests.support.local_sgd_process import EVERY, MOMENTUM, RATE, SAVED, STEPS, evaluated, trained
from tests.support.together import run_together
from textmill.cli import main
from textmill.commands.plan import communication_of
from textmill.config.engines import MeshConfig, TorchEngine
from textmill.engines.memory import Device, Estimator, fake_ranks
from textmill.engines.meshes import mesh_of
from textmill.errors import TextmillError

State = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local-sgd")
    assert run_together([sys.executable, local_sgd_process.__file__, str(folder)], 2) == "ok"
    return folder


@pytest.fixture(scope="module")
def numbers(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "numbers.json").read_text())
    return found


def weights_in(state: State) -> State:
    return {name: values for name, values in state.items() if "/" not in name}


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], dict[int, list[State]], State]:
    """The mean loss of each step, the state of both workers after SAVED, and the shared weights at the last
    synchronisation: two engines of one process, each with its half of every batch, and the outer step in numpy."""
    halves = [slice(0, ROWS // 2), slice(ROWS // 2, ROWS)]
    workers: list[Any] = [started(config_of({}, batch=ROWS // 2, clip=0.0)) for _ in halves]
    shared = weights_in(state_of(workers[0]))
    momentum = {name: np.zeros_like(values) for name, values in shared.items()}
    losses = []
    saved = {}
    for step in range(STEPS):
        of_workers = [
            trained(engine, range(step, step + 1), rows) for engine, rows in zip(workers, halves, strict=True)
        ]
        losses.append(float(np.mean(of_workers)))
        if (step + 1) % EVERY == 0:
            states = [state_of(engine) for engine in workers]
            for name, values in shared.items():
                move = values - sum(state[name] for state in states) / len(states)
                momentum[name] = MOMENTUM * momentum[name] + move
                shared[name] = values - RATE * (move + MOMENTUM * momentum[name])
            for engine, state in zip(workers, states, strict=True):
                moments = [(name, values) for name, values in state.items() if "/" in name]
                engine.load(shared.items(), moments, step + 1, "the outer step")
        if step + 1 in SAVED:
            saved[step + 1] = [state_of(engine) for engine in workers]
    return losses, saved, shared


def test_workers_train_alone_and_an_outer_nesterov_step_joins_them(
    numbers: dict[str, Any], folder: Path, expected: tuple[list[float], dict[int, list[State]], State]
) -> None:
    losses, saved, _ = expected
    assert numbers["steps"] == pytest.approx(losses, rel=1e-6)
    for step, states in saved.items():
        found = dict(np.load(folder / f"state-{step}.npz"))
        for name, values in weights_in(states[0]).items():
            mean = (values + states[1][name]) / 2
            np.testing.assert_allclose(found[name], mean, rtol=0, atol=2e-5)
            for kind in ("m", "v"):
                for worker, prefix in enumerate(("", "local1.")):
                    moment = states[worker][f"{kind}/{name}"]
                    difference = np.abs(found[f"{prefix}{kind}/{name}"] - moment).max()
                    assert difference <= 1e-2 * np.abs(moment).max(), (name, kind, worker)


def test_a_resume_is_exact_at_a_synchronisation_and_between_two(numbers: dict[str, Any]) -> None:
    """Losses, and all weights and states at the end, bit for bit."""
    for saved in SAVED:
        losses, same = numbers["resumed"][str(saved)]
        assert losses == numbers["steps"][saved:]
        assert same
    assert numbers["checksums"][0] == numbers["checksums"][1]


def test_a_run_without_local_sgd_goes_on_from_the_mean_of_the_workers(numbers: dict[str, Any], folder: Path) -> None:
    state = dict(np.load(folder / f"state-{SAVED[0]}.npz"))
    engine = started(config_of({}, clip=0.0))
    engine.load(weights_in(state).items(), [one for one in state.items() if "/" in one[0]], SAVED[0], "saved")
    assert evaluated(engine) == pytest.approx(numbers[f"valid-{SAVED[0]}"], rel=1e-6)
    moments = {name for name in state_of(engine) if "/" in name}
    assert moments == {name for name in state if name.startswith(("m/", "v/"))}


def test_weights_are_sent_once_in_so_many_steps() -> None:
    """Against the gradients of as many steps, and the plan."""
    every, world = 4, 8
    sent = {}
    for key, settings in (("local", {"sync_every": every}), ("synchronous", {})):
        config = fake_config({}, world, **settings)
        shape = shape_of(config)
        estimator = Estimator(shape, config.train)
        estimate = estimator.estimate(config.engine, world, Device(False, 1 << 34, "fp32"))
        plan = sum(communication_of(config.engine, estimator, estimate).values())
        with fake_ranks(world):
            engine = fake_started(config, world)
            with Collectives() as collectives:
                for step in range(every):
                    engine.train_step(batch_of_rank(), step, 1e-3)
        sent[key] = sum(one.sent for one in collectives.found)
        assert sent[key] / every == pytest.approx(plan, abs=100), "a few numbers in each step"
    assert sent["synchronous"] / sent["local"] == pytest.approx(every, rel=1e-2)
    assert engine.local_sgd is None


@pytest.mark.parametrize(
    ("settings", "world", "message"),
    [
        ({"mesh": MeshConfig(shard=2)}, 2, r"does not work with engine\.mesh\.shard=2"),
        ({"mesh": MeshConfig(tensor=2)}, 4, r"does not work with engine\.mesh\.tensor=2"),
        ({"mesh": MeshConfig(pipeline=2)}, 4, r"does not work with engine\.mesh\.pipeline=2"),
        ({"precision": "fp16"}, 2, r"does not work with engine\.precision=fp16"),
        ({}, 1, "needs at least 2 replicas, found 1; start more processes"),
    ],
)
def test_what_local_sgd_does_not_work_with_is_refused(settings: dict[str, Any], world: int, message: str) -> None:
    config = config_of({})
    engine = TorchEngine(device="cpu", sync_every=4, **settings)
    with pytest.raises(TextmillError, match=f"engine.sync_every: {message}"):
        mesh_of(engine, config.train, local_sgd_process.shape_of(config), world)


def test_verify_refuses_local_sgd(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "quickstart", "engine.sync_every=8"]) == 2
    assert "local SGD does not give the numbers of one process" in capsys.readouterr().err
