"""Run a command and measure the time and memory of all its processes, from Linux's /proc."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """A finished command."""

    seconds: float
    peak: float
    """Peak memory in MB of all its processes; shared memory counts once."""
    cpu: float
    """CPU seconds of all its processes, which hardly depend on the load of the machine."""
    output: str


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process.

    The system's sum over a parent's children omits those that were not waited for, so each process is read.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def run(command: list[str], pause: float = 0.1) -> Run:
    """Run a command and sample its memory every `pause` seconds."""
    start, peak, used = time.perf_counter(), 0.0, dict[int, float]()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        while process.poll() is None:
            pids = process_tree(process.pid)
            peak = max(peak, sum(map(memory_megabytes, pids)))
            used.update((pid, max(cpu_seconds(pid), used.get(pid, 0.0))) for pid in pids)
            time.sleep(pause)
        seconds = time.perf_counter() - start
        output.seek(0)
        printed = output.read()
    assert process.returncode == 0, printed[-3000:]
    return Run(seconds, peak, sum(used.values()), printed)


def process_tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    try:
        children = [
            child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
        ]
    except OSError:
        children = []
    return [pid, *(other for child in children for other in process_tree(int(child)))]


def memory_megabytes(pid: int) -> float:
    """The proportional set size of a process, in MB."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
