"""Processes that meet each other, started as srun would start them: torchrun would first load torch for itself."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.engine_ends import left_behind
from textmill.verification.launcher import free_port

LONGEST = 900


def ended_together(command: list[str], count: int) -> str:
    """How a command ended as so many processes: well, or what the first to fail said; none outlives this, and who was left is told."""
    root, port = str(Path(__file__).parents[2]), str(free_port())
    meet = {**os.environ, "PYTHONPATH": root, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with left_behind() as left, ExitStack() as files:
        jobs = []
        for rank in map(str, range(count)):
            said = files.enter_context(tempfile.TemporaryFile("w+"))
            jobs.append(
                (
                    subprocess.Popen(command, env={**meet, "RANK": rank, "LOCAL_RANK": rank}, stdout=said, stderr=said),
                    said,
                )
            )
        until = time.monotonic() + LONGEST
        while (
            any(job.poll() is None for job, _ in jobs)
            and not any(job.poll() for job, _ in jobs)
            and time.monotonic() < until
        ):
            time.sleep(0.05)
        codes = [job.poll() for job, _ in jobs]
        for job, _ in jobs:
            job.kill()
            job.wait()
        if any(codes) or None in codes:
            bad = next((rank for rank, code in enumerate(codes) if code), codes.index(None) if None in codes else 0)
            jobs[bad][1].seek(0)
            return f"rank {bad} ended with {codes[bad]}: {jobs[bad][1].read()[-3000:]}"
    return f"left {len(left)} behind ({'; '.join(left.values())})" if left else "well"
