"""torchrun, deepspeed, mpirun and srun start the same run: equal losses, with the real programs where there are any."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.kill_ranks import node_arguments, run_nodes
from bench.kill_train import read_metrics, textmill, train_arguments
from tests.conftest import ROOT
from tests.support.programs import find_program
from tests.support.slurm_process import one_node_slurm
from tests.support.waiting import LONGEST

STEPS = 4
COMMAND = [sys.executable, "-m", "textmill"]
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    return Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("launchers") / "root"))


@pytest.fixture(scope="module")
def alone(root: Path) -> list[dict[str, Any]]:
    """The metrics of one process."""
    done = textmill(*arguments(root, root / "alone"))
    assert done.returncode == 0, done.stderr
    return read_metrics(root / "alone")


def arguments(root: Path, run: Path) -> list[str]:
    return [*train_arguments(root, run, STEPS), "train.warmup=0", "engine.device=cpu", "engine.timeout=120"]


def check(command: list[str], run: Path, alone: list[dict[str, Any]], env: dict[str, str]) -> None:
    """Run a command and compare its metrics with those of one process."""
    words = [*command, *arguments(run.parent, run)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=LONGEST, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
    assert done.stdout.count("2 processes on cpu") == 1, done.stdout[-3000:]
    compare(read_metrics(run), alone)


def compare(found: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    losses = [{name: value for name, value in row.items() if name in ("step", "loss", "valid_loss")} for row in found]
    assert len(losses) == len(alone) > 0
    for one, other in zip(losses, alone, strict=True):
        assert one == {name: pytest.approx(other[name], rel=1e-6) for name in one}


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.long
def test_deepspeed(root: Path, alone: list[dict[str, Any]], environment: dict[str, str]) -> None:
    from textmill.verification.launcher import free_port

    command = [*DEEPSPEED, str(free_port()), "--module", "textmill"]
    check(command, root / "deepspeed", alone, {**environment, "DS_ACCELERATOR": "cpu"})


@pytest.mark.long
def test_mpirun(root: Path, alone: list[dict[str, Any]], environment: dict[str, str]) -> None:
    program = find_program("mpirun")
    found = subprocess.run([program, "--version"], capture_output=True, text=True)
    if "Open" not in found.stdout:  # Open MPI, or OpenRTE, its launcher
        pytest.skip("needs Open MPI's mpirun (Debian: openmpi-bin)")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    check([program, "-n", "2", "--oversubscribe", *COMMAND], root / "mpirun", alone, {**environment, **as_root})


@pytest.mark.long
def test_srun(root: Path, alone: list[dict[str, Any]], tmp_path: Path, environment: dict[str, str]) -> None:
    with one_node_slurm(tmp_path / "slurm") as slurm:
        command = [find_program("srun"), "-n", "2", "--overcommit", "--kill-on-bad-exit=1", *COMMAND]
        check(command, root / "srun", alone, {**environment, **slurm})


@pytest.mark.long
def test_the_others_go_on_when_a_node_is_lost(root: Path) -> None:
    """With the batch, the data and so the losses of the run that nothing disturbed."""
    assert textmill(*node_arguments(root, root / "undisturbed")).returncode == 0
    run = root / "lost"
    endings = run_nodes(node_arguments(root, run), run / "metrics.jsonl", nodes=3, lost=2, after=12)
    assert [ending.code for ending in endings] == [0, 0], endings[0].output[-3000:]
    assert re.search("on 2 processes.*resumes from step [1-9]0", endings[0].output)
    found, wanted = (
        {row["step"]: row["loss"] for row in read_metrics(one) if "loss" in row} for one in (run, root / "undisturbed")
    )
    assert found == pytest.approx(wanted, rel=1e-5)


JOB = str(os.getpid())
VARIABLES = {
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "{rank}",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": JOB,
        "PMIX_RANK": "{rank}",
    },
    "srun": {
        "SLURM_PROCID": "{rank}",
        "SLURM_LOCALID": "{rank}",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": JOB,
    },
}
"""What Open MPI 4.1 and SLURM 22.05 set on one machine."""


@pytest.mark.parametrize("launcher", VARIABLES)
def test_variables_of(launcher: str, root: Path, alone: list[dict[str, Any]], environment: dict[str, str]) -> None:
    """For machines without these launchers."""
    run = root / f"{launcher}-variables"
    jobs = []
    for rank in "01":
        own = {name: value.format(rank=rank) for name, value in VARIABLES[launcher].items()}
        words = [*COMMAND, *arguments(root, run)]
        jobs.append(subprocess.Popen(words, env={**environment, **own}, stdout=subprocess.PIPE, text=True))
    outputs = [job.communicate(timeout=LONGEST)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert "2 processes on cpu" in outputs[0]
    assert outputs[1] == "", "only rank 0 prints"
    compare(read_metrics(run), alone)
