"""Processes of a trial, started by ourselves on this machine, with the words of a launcher in their environment."""

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
from textmill.storage.files import read_json
from textmill.storage.tensor_files import Named, read_tensors
from textmill.verification.small_config import hand_over

PATIENCE = 900
"""Seconds that a trial may take."""
PORTS = (20_000, 32_000)
"""Where a port is looked for: below those that connections are given by chance."""
QUIET = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS", "TORCHELASTIC_RUN_ID")
"""Words of the launcher that this process itself may have been started by."""


@dataclass(frozen=True)
class Seen:
    """What a trial's processes saw."""

    steps: list[dict[str, float]]
    valid: list[float]
    copies: list[str]
    gradients: list[Named]


def launch(trials: list[tuple[list[RunConfig], Path, int]]) -> list[list[Seen]]:
    """Run lists of configs, each list on so many processes, all lists at the same time."""
    with ExitStack() as held:
        started = [
            (held.enter_context(_started(configs, folder, processes)), folder) for configs, folder, processes in trials
        ]
        for jobs, folder in started:
            _await(jobs, folder)
    return [[_seen(folder / str(number)) for number in range(len(configs))] for configs, folder, _ in trials]


def _await(jobs: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Until all have ended well, or one has not."""
    until = time.monotonic() + PATIENCE
    while any(job.poll() is None for job in jobs) and not any(job.poll() for job in jobs):
        if time.monotonic() > until:
            late = next(number for number, job in enumerate(jobs) if job.poll() is None)
            raise TextmillError(
                f"verify: process {late} of {len(jobs)} did not end in {PATIENCE} seconds; {_last(folder, late)}"
            )
        time.sleep(0.05)
    for number, job in enumerate(jobs):
        if job.poll():
            raise TextmillError(
                f"verify: process {number} of {len(jobs)} ended with {job.returncode}; {_last(folder, number)}"
            )


def _seen(folder: Path) -> Seen:
    seen: dict[str, Any] = read_json(folder / "seen.json")
    gradients = [(name, values.copy()) for name, values in read_tensors(folder / "gradients.safetensors")]
    return Seen(seen["steps"], seen["valid"], seen["copies"], gradients)


@contextmanager
def _started(configs: list[RunConfig], folder: Path, processes: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes for a list of configs, each with a file for what it says; none outlives this."""
    for number, config in enumerate(configs):
        (folder / str(number)).mkdir(parents=True)
        hand_over(config, folder / str(number))
    command = [
        sys.executable,
        "-m",
        "textmill.verification.trial_process",
        *(str(folder / str(number)) for number in range(len(configs))),
    ]
    jobs = []
    try:
        for number, environment in enumerate(_environments(configs[0].engine.one_process, processes)):
            with open(folder / f"said-{number}", "wb") as said:
                jobs.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said))
        yield jobs
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def _environments(one: bool, processes: int) -> list[dict[str, str]]:
    """What each process is told: its number among all; where one process has all devices, how many of them to pretend."""
    plain = {key: value for key, value in os.environ.items() if key not in QUIET} | {"OMP_NUM_THREADS": "1"}
    if one:
        flags = f"--xla_force_host_platform_device_count={processes} --xla_backend_optimization_level=0"  # a program is used a few times
        return [plain | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}]
    if processes == 1:
        return [plain]
    meet = plain | {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [meet | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def free_port() -> int:
    """A port of this machine that is free, and will be when it is wanted: the system deals out none of these."""
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as trial, suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port


def _last(folder: Path, number: int) -> str:
    """The last line that a process said."""
    lines = (folder / f"said-{number}").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"it said: {lines[-1]}" if lines else "it said nothing"
