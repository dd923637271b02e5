"""A run that changes its engine three times by a setting, in the same folder; compared with a run of torch alone."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from bench.engine_exits import run_to_exit
from bench.kill_train import read_metrics, textmill, train_arguments

pytestmark = pytest.mark.long

for extra in ("deepspeed", "jax"):
    pytest.importorskip(extra, reason=f"needs the extra {extra}")

SITTINGS = [
    ["engine.kind=torch"],
    ["engine.kind=deepspeed", "engine.zero=3", "engine.micro_batch=2"],
    ["engine.kind=jax", "engine.mesh.shard=2", "engine.mesh.tensor=2", "engine.micro_batch=2"],
    ["engine.kind=torch", "engine.micro_batch=4"],
]
EACH = 10
"""Steps between two changes of the engine."""
BOUND = 1e-5
"""Largest relative difference of a loss from torch's; of a weight or moment, relative to its tensor's norm."""


def words(root: Path, run: Path, steps: int, *more: str) -> list[str]:
    often = [
        f"train.save_every={EACH}",
        f"train.checkpoints.keep={len(SITTINGS)}",
        f"train.evaluate_every={EACH}",
        "train.evaluate_batches=2",
    ]
    return [*train_arguments(root, run, steps), f"train.decay_steps={EACH * len(SITTINGS)}", *often, *more]


def sit(root: Path, run: Path, number: int) -> None:
    """Train on one engine: DeepSpeed on two processes, JAX on four devices, torch on one; none is left at the end."""
    engine, arguments = SITTINGS[number], words(root, run, EACH * (number + 1), *SITTINGS[number])
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        if "engine.kind=deepspeed" in engine
        else []
    )
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment = {
        **os.environ,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, *launcher, "-m", "textmill", *arguments]
    assert run_to_exit(command, environment) == "ok"


def state_of(run: Path, step: int) -> dict[str, NDArray[np.float32]]:
    """Weights and moments by name, without biases of keys: their gradient is only rounding, which Adam amplifies."""
    folder = run / f"step-{step:07d}"
    found = {**load_file(folder / "model.safetensors"), **load_file(folder / "optimizer.safetensors")}
    return {
        name: np.delete(values.reshape(3, -1), 1, 0) if name.endswith("c_attn.bias") else values
        for name, values in found.items()
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> tuple[Path, Path]:
    """The run of torch alone, and the run that changed its engine."""
    root = Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("chain") / "root"))
    alone, handed = root / "alone", root / "handed"
    done = textmill(*words(root, alone, EACH * len(SITTINGS)))
    assert done.returncode == 0, done.stderr
    for number in range(len(SITTINGS)):
        sit(root, handed, number)
    return alone, handed


def test_every_loss_matches_torch(runs: tuple[Path, Path]) -> None:
    alone, handed = (read_metrics(run) for run in runs)
    assert [line["step"] for line in handed if "loss" in line] == list(range(1, EACH * len(SITTINGS) + 1))
    for ours, wanted in zip(handed, alone, strict=True):
        assert ours.keys() == wanted.keys()
        for name in ours.keys() & {"loss", "valid_loss", "learning_rate"}:
            assert ours[name] == pytest.approx(wanted[name], rel=BOUND), (name, ours["step"])


@pytest.mark.parametrize("step", [EACH * (number + 1) for number in range(len(SITTINGS))])
def test_checkpoints_of_every_engine_match_torch(step: int, runs: tuple[Path, Path]) -> None:
    kind = SITTINGS[step // EACH - 1][0].removeprefix("engine.kind=")
    assert f"engine:\n  kind: {kind}\n" in (runs[1] / f"step-{step:07d}" / "run.yaml").read_text(), (
        "this engine wrote the checkpoint"
    )
    wanted, ours = (state_of(run, step) for run in runs)
    assert ours.keys() == wanted.keys()
    assert sum(name.startswith(("m/", "v/")) for name in ours) == 2 * sum(
        not name.startswith(("m/", "v/")) for name in ours
    )
    for name, values in wanted.items():
        assert ours[name].shape == values.shape, name
        assert np.linalg.norm(ours[name] - values) <= BOUND * np.linalg.norm(values), name
