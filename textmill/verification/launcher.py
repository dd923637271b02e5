"""Start the processes of a trial on this machine, with the environment variables that a launcher would set."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.storage.files import read_json, write_text
from textmill.storage.tensor_files import Named, read_tensors

TIMEOUT = 900
"""Seconds that a trial may take."""
PORTS = (20_000, 32_000)
"""The range of `free_port`: below the ports that the system gives to outgoing connections."""
LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
)
"""Removed from the environment of a trial's processes, in case this process was itself started by a launcher."""


@dataclass(frozen=True)
class TrialResult:
    """The numbers that a trial's processes recorded."""

    steps: list[dict[str, float]]
    valid: list[float]
    weight_hashes: list[str]
    """The hash of all weights at the end, by rank."""
    gradients: list[Named]


def launch(trials: list[tuple[list[RunConfig], Path, int]]) -> list[list[TrialResult]]:
    """Run lists of configs, each list in a folder on a number of processes; all lists run at the same time."""
    with ExitStack() as stack:
        started = [
            (stack.enter_context(_start(configs, folder, processes)), folder) for configs, folder, processes in trials
        ]
        for jobs, folder in started:
            _wait(jobs, folder)
    return [[_read_result(folder / str(number)) for number in range(len(configs))] for configs, folder, _ in trials]


def _wait(jobs: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until all processes have succeeded; raise as soon as one fails or the time is over."""
    deadline = time.monotonic() + TIMEOUT
    while any(job.poll() is None for job in jobs) and not any(job.poll() for job in jobs):
        if time.monotonic() > deadline:
            late = next(number for number, job in enumerate(jobs) if job.poll() is None)
            raise TextmillError(
                f"verify: process {late} of {len(jobs)} did not end in {TIMEOUT} seconds; {_last_line(folder, late)}"
            )
        time.sleep(0.05)
    for number, job in enumerate(jobs):
        if job.poll():
            raise TextmillError(
                f"verify: process {number} of {len(jobs)} exited with code {job.returncode}; "
                f"{_last_line(folder, number)}"
            )


def _read_result(folder: Path) -> TrialResult:
    result: dict[str, Any] = read_json(folder / "result.json")
    gradients = [(name, values.copy()) for name, values in read_tensors(folder / "gradients.safetensors")]
    return TrialResult(result["steps"], result["valid"], result["weight_hashes"], gradients)


@contextmanager
def _start(configs: list[RunConfig], folder: Path, processes: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the processes for a list of configs, each with a file for its output; all are killed at the end."""
    for number, config in enumerate(configs):
        (folder / str(number)).mkdir(parents=True)
        write_text(folder / str(number) / "config.json", config.model_dump_json())
    command = [
        sys.executable,
        "-m",
        "textmill.verification.trial_process",
        *(str(folder / str(number)) for number in range(len(configs))),
    ]
    jobs = []
    try:
        for number, environment in enumerate(_environments(configs[0].engine.one_process, processes)):
            with open(_output_file(folder, number), "wb") as output:
                jobs.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
        yield jobs
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def _environments(one_process: bool, processes: int) -> list[dict[str, str]]:
    """The environment of each process: rank and world size; or, for one process, the number of simulated devices."""
    base = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    base["OMP_NUM_THREADS"] = "1"
    if one_process:
        # Without optimization: compiling takes longer than the few steps of a trial.
        small = f"--xla_force_host_platform_device_count={processes} --xla_backend_optimization_level=0"
        flags = f"{base.get('XLA_FLAGS', '')} {small}".strip()
        return [base | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}]
    if processes == 1:
        return [base]
    group = base | {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def free_port() -> int:
    """A free port of this machine, from a range that the system does not give to other connections."""
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port


def _output_file(folder: Path, number: int) -> Path:
    return folder / f"output-{number}"


def _last_line(folder: Path, number: int) -> str:
    """The last line that a process printed."""
    lines = _output_file(folder, number).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"its last line: {lines[-1]}" if lines else "it printed nothing"
