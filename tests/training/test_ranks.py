"""The training loop on several processes under torchrun: same numbers as one process, one output, one end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.engine_exits import end_leftovers
from bench.kill_train import read_metrics, textmill, train_arguments
from tests.support.preloaded import open_template
from tests.support.waiting import LONGEST, wait_for
from textmill.errors import TextmillError
from textmill.processes.launch import first_host, read_launch
from textmill.verification.launcher import free_port

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "textmill"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tokenized: Path) -> Path:
    return Path(shutil.copytree(tokenized, tmp_path_factory.mktemp("ranks") / "root"))


def words(root: Path, run: Path, steps: int, *more: str) -> list[str]:
    return [*train_arguments(root, run, steps), "train.schedule=constant", *more]


def launched(*words: str) -> subprocess.CompletedProcess[str]:
    """Two processes to their end; none is left, neither alive nor as a zombie."""
    open_template()  # before the block, after which it would count as left
    with end_leftovers() as left:
        done = subprocess.run([*TORCHRUN, *words], capture_output=True, text=True, timeout=300)
    assert not left
    return done


def assert_equal(ours: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert len(ours) == len(wanted)
    for one, other in zip(ours, wanted, strict=True):
        assert one.keys() == other.keys()
        assert one == {
            name: pytest.approx(value, rel=2e-5 if name == "grad_norm" else 1e-6) for name, value in other.items()
        }


@pytest.mark.long
def test_two_processes_match_one_and_either_resumes(root: Path) -> None:
    alone, two = root / "alone", root / "two"
    one = textmill(*words(root, alone, 16), env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"})
    assert one.returncode == 0, one.stderr
    loaded = {line.rpartition("|")[2].strip() for line in one.stderr.splitlines()}
    assert "torch.nn" in loaded
    assert not loaded & {"torch._dynamo", "torch.distributed.tensor", "sympy"}, (
        "startup time that one process does not need"
    )
    done = launched(*words(root, two, 10, "engine.micro_batch=2"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 processes on cpu") == 1, "only one rank prints"
    assert_equal(read_metrics(two), read_metrics(alone)[: len(read_metrics(two))])
    again = launched(*words(root, two, 10))
    assert again.stdout.count("done already") == 1, again.stderr
    assert textmill(*words(root, two, 16, "engine.micro_batch=2")).returncode == 0
    assert_equal(read_metrics(two), read_metrics(alone))


@pytest.mark.long
def test_a_signal_to_the_launcher_stops_all_after_one_step(root: Path) -> None:
    run = root / "stopped"
    long = words(root, run, 2000, "train.save_every=100000", "train.evaluate_every=100000")
    process = subprocess.Popen([*TORCHRUN, *long], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics = run / "metrics.jsonl"
    wait_for(lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size))
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, output = process.communicate(timeout=LONGEST)
    assert output.count("stopped by SIGTERM at step") == 1, output
    stopped = json.loads((run / "stopped.json").read_text())
    assert (run / f"step-{stopped['step']:07d}" / "manifest.json").is_file()
    assert read_metrics(run)[-1]["step"] == stopped["step"]


@pytest.mark.long
def test_a_batch_that_does_not_divide_is_refused_once(root: Path) -> None:
    refused = launched(*words(root, root / "odd", 10, "train.batch=9"))
    assert refused.returncode != 0
    assert refused.stderr.count("train.batch: 9 samples cannot be divided evenly by 2 processes; 8 or 10 can") == 1, (
        refused.stderr
    )
    assert "TextmillError" not in refused.stderr, "no traceback of textmill"
    assert not list((root / "odd").glob("step-*"))


def test_launcher_environments() -> None:
    assert read_launch({}) is None
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
    slurm = {
        "SLURM_PROCID": "5",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "gpu[03-07,9],x",
        "SLURM_JOB_ID": "7",
    }
    # As mpirun of Open MPI 4.1 sets them, inside a SLURM job whose tasks are its daemons.
    mpi = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": "1",
        "MASTER_ADDR": "b",
        "MASTER_PORT": "6",
    }
    wanted_of = ((torchrun, (3, 8, 1, "a:5")), (slurm, (5, 8, 1, "gpu03:20007")), (mpi, (3, 8, 1, "b:6")))
    for environment, wanted in wanted_of:
        launch = read_launch(environment)
        assert launch is not None
        assert (launch.rank, launch.world, launch.local, launch.address) == wanted
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None, "a batch script is not a SLURM step"
    with pytest.raises(TextmillError, match=r"several machines, and no MASTER_ADDR; .* mpirun -x MASTER_ADDR=HOST"):
        read_launch({name: value for name, value in mpi.items() if name != "MASTER_ADDR"})
    here = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "1234"}
    ports = {read_launch({**here, "PMIX_NAMESPACE": job}).address for job in ("1234", "1235", "1236")}  # type: ignore[union-attr]
    assert len(ports) == 3, "jobs on one machine do not meet"
    for wrong in ({"RANK": "first", "WORLD_SIZE": "2"}, {"RANK": "5", "WORLD_SIZE": "2"}):
        with pytest.raises(
            TextmillError,
            match=r"the launcher's environment: .*(first|rank 5 of 2).*; start .* with torchrun, srun or mpirun",
        ):
            read_launch(wrong)
    assert [first_host(nodes) for nodes in ("a1,a2", "b[7,9]", "c-[001-100].x", "d")] == ["a1", "b7", "c-001", "d"]


@pytest.mark.long
def test_missing_processes_are_reported_and_a_signal_ends_the_wait(root: Path) -> None:
    place = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    short = "import sys; from textmill.processes import heartbeat; heartbeat.START_SECONDS = 2; "
    short += "from textmill.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", short, *words(root, root / "alone-of-two", 10)]
    first = subprocess.run(
        [*command, "engine.timeout=2"], env={**place, "RANK": "0"}, capture_output=True, text=True, timeout=300
    )
    assert first.returncode == 2
    assert first.stderr.count("\n") == 1, first.stderr
    assert "the 2 processes of this run did not connect" in first.stderr
    second = subprocess.Popen([*command, "engine.timeout=600"], env={**place, "RANK": "1"}, stderr=subprocess.DEVNULL)
    assert not _ended(second, 5), "no other process came"
    second.terminate()
    assert _ended(second, LONGEST)


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True
