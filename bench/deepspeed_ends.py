"""Runs of DeepSpeed one after another, each a step further than the last: none hangs, and no process is left over.

python bench/deepspeed_ends.py [runs] [processes]      (20 on 2 if not said)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MARK = "TEXTMILL_BENCH_RUN"
SETTINGS = [
    "tokenizer.vocab=300", "model.shape.heads=2", "model.shape.width=32", "train.length=32", "train.batch=4", "train.warmup=0",
    "train.evaluate_batches=1", "train.keep=1", "engine.device=cpu", "engine.kind=deepspeed", "engine.zero=3",
]  # fmt: skip
LONGEST = 300
"""Seconds after which a run is taken to hang."""


def left_over(mark: str) -> list[str]:
    """Processes that bear the mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(folder.name)
        except OSError:
            continue
    return found


def main() -> None:
    """Prepare once, then train again and again."""
    runs, processes = (int(word) for word in [*sys.argv[1:], *["20", "2"][len(sys.argv) - 1 :]])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m", "textmill"]
    with tempfile.TemporaryDirectory() as root:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: root, "PYTHONPATH": str(Path(__file__).parents[1])}
        words = ["quickstart", f"folder={root}", *SETTINGS]
        for verb in ("prepare", "tokenize"):
            subprocess.run([sys.executable, "-m", "textmill", verb, *words], env=environment, check=True, capture_output=True)
        longest = 0.0
        for run in range(1, runs + 1):
            start = time.perf_counter()
            command = [*launch, "train", *words, f"train.steps={run}"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST)
            took, left = time.perf_counter() - start, left_over(root)
            longest = max(longest, took)
            if done.returncode or left:
                raise SystemExit(f"run {run}: exit code {done.returncode}, {len(left)} processes left over\n{done.stderr[-3000:]}")
        print(f"{runs} runs on {processes} processes ended by themselves with code 0, none left over; the longest took {longest:.0f} s")


if __name__ == "__main__":
    main()
