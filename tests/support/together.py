"""Run a command as several ranks without a launcher, as srun does; torchrun would first load torch itself."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.engine_exits import end_leftovers
from tests.support.preloaded import open_template
from textmill.verification.launcher import free_port

LONGEST = 900


def run_together(command: list[str], count: int) -> str:
    """Run a command as `count` ranks; return "ok", the output of the first failed rank, or the leftover processes."""
    root, port = str(Path(__file__).parents[2]), str(free_port())
    common = {
        **os.environ,
        "PYTHONPATH": root,
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    open_template()  # before the block, after which it would count as left
    with end_leftovers() as left, ExitStack() as files:
        jobs = []
        for rank in map(str, range(count)):
            output = files.enter_context(tempfile.TemporaryFile("w+"))
            jobs.append(
                (
                    subprocess.Popen(
                        command, env={**common, "RANK": rank, "LOCAL_RANK": rank}, stdout=output, stderr=output
                    ),
                    output,
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
    return f"left processes: {'; '.join(left.values())}" if left else "ok"
