"""The launch scripts: valid shell, options that torchrun knows, and a new job if the run can be resumed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.kill_train import train_arguments
from textmill.verification.launcher import free_port
from textmill.where import recipes_folder

LAUNCH = recipes_folder() / "launch"
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & other=$!
SLURM_PROCID=0 SLURM_LOCALID=0 "$@"; code=$?
wait $other
exit $code
"""
"""An srun that starts two tasks on this machine."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    return Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("launch") / "root"))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment whose PATH has this interpreter, its torchrun and a fake cluster."""
    tools = tmp_path / "bin"
    tools.mkdir()
    scripts = {
        "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
        "torchrun": f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n',
        "srun": SRUN,
        "scontrol": f'#!/bin/sh\necho "$@" >> {tmp_path}/scontrol\n',
    }
    for name, text in scripts.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    path = os.pathsep.join([str(tools), os.environ["PATH"]])
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(recipes_folder().parent),
        "MASTER_PORT": str(free_port()),
        "RANKS": "2",
    }


def run(script: str, arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(LAUNCH / script), *arguments], env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("path", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_script_prints_its_usage(path: Path, environment: dict[str, str]) -> None:
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    bare = run(path.name, [], environment)
    assert bare.returncode == 2
    hosts = "HOSTFILE " if "hosts" in path.name else ""
    assert f"{path.name} {hosts}CONFIG.yaml [section.key=value ...]" in bare.stderr
    assert (
        f"{path.name} {hosts}CONFIG.yaml [section.key=value ...]"
        in path.read_text(encoding="utf-8").partition("set -uo")[0]
    )


def test_torchrun_knows_every_option() -> None:
    from torch.distributed.run import parse_args

    command = (
        (LAUNCH / "many-nodes.sh").read_text(encoding="utf-8").partition("\ntorchrun ")[2].partition("-m textmill")[0]
    )
    options = [word for word in command.split() if word.startswith("--")]
    assert len(options) == 5
    example = "--nnodes 4 --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint a:1 --rdzv-id b -m textmill train x"
    parsed = parse_args(example.split())
    assert all(hasattr(parsed, option.removeprefix("--").replace("-", "_")) for option in options)


@pytest.mark.long
def test_one_node(root: Path, environment: dict[str, str]) -> None:
    folder = root / "one"
    done = run("one-node.sh", [*train_arguments(root, folder, 2)[1:], "train.warmup=0"], environment)
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout
    assert (folder / "step-0000002" / "manifest.json").is_file()


@pytest.mark.long
def test_slurm_requeues_a_run_that_can_be_resumed(root: Path, environment: dict[str, str], tmp_path: Path) -> None:
    folder = root / "slurm"
    arguments = [*train_arguments(root, folder, 4)[1:], "train.warmup=0", "engine.timeout=60"]
    job = {**environment, "SLURM_JOB_ID": "77", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    lost = run("slurm.sh", arguments, {**job, "TEXTMILL_FAULT": "kill@step:2:1"})
    assert lost.returncode == 75, lost.stderr
    assert (tmp_path / "scontrol").read_text() == "requeue 77\n"
    again = run("slurm.sh", arguments, {**job, "SLURM_RESTART_COUNT": "1"})
    assert again.returncode == 0, again.stderr
    assert (folder / "step-0000004" / "manifest.json").is_file()
    assert (tmp_path / "scontrol").read_text() == "requeue 77\n", "a finished run is not queued again"
