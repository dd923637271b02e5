"""Runs of each engine one after another, each a step further than the last: how many hang, fail, or leave a process behind.

python bench/engine_ends.py [runs] [engine,engine...]      (20 of torch, deepspeed and jax if not said, on two processes or devices)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MARK = "TEXTMILL_BENCH_RUN"
SETTINGS = [
    "tokenizer.vocab=300", "model.shape.heads=2", "model.shape.width=32", "train.length=32", "train.batch=4", "train.warmup=0",
    "train.evaluate_batches=1", "train.keep=1", "engine.device=cpu",
]  # fmt: skip
ENGINES = {"torch": ["engine.mesh.shard=2"], "deepspeed": ["engine.zero=3"], "jax": ["engine.mesh.shard=2"]}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
LONGEST = 300
"""Seconds after which a run is taken to hang."""


def left_over(mark: str) -> list[int]:
    """Processes that bear the mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def ended(command: list[str], environment: dict[str, str]) -> str:
    """How a run ended: well, badly, or not at all; what it leaves behind is named and then ended."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONGEST)
        how = f"failed with {done.returncode}: {done.stderr[-1000:]}" if done.returncode else "well"
    except subprocess.TimeoutExpired:
        how = "hung"
    left = left_over(environment[MARK])
    for process in left:
        os.kill(process, signal.SIGKILL)
    return f"{how}, left {len(left)} behind" if left else how


def main(words: list[str]) -> None:
    """Prepare once, then train again and again with each engine."""
    runs, kinds = int(words[0]) if words else 20, words[1].split(",") if len(words) > 1 else [*ENGINES]
    bad = False
    with tempfile.TemporaryDirectory() as root:
        plain = {**os.environ, "OMP_NUM_THREADS": "1", MARK: root, "PYTHONPATH": str(Path(__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
        programs = {"JAX_COMPILATION_CACHE_DIR": f"{root}/programs", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
        environment = {**plain, **programs, "XLA_FLAGS": flags}
        asked = ["quickstart", f"folder={root}", *SETTINGS]
        for verb in ("prepare", "tokenize"):
            subprocess.run([sys.executable, "-m", "textmill", verb, *asked], env=environment, check=True, capture_output=True)
        for kind in kinds:
            start, ways = time.perf_counter(), []
            engine = [f"engine.kind={kind}", *ENGINES[kind], f"train.folder={root}/{kind}"]
            command = [sys.executable, *([] if kind == "jax" else TORCHRUN), "-m", "textmill", "train", *asked, *engine]
            for run in range(1, runs + 1):
                ways.append(ended([*command, f"train.steps={run}"], environment))
            others = [way for way in ways if way != "well"]
            bad = bad or bool(others)
            each = (time.perf_counter() - start) / runs
            print(
                f"{kind}: {ways.count('well')} of {runs} runs ended by themselves with code 0 and left nothing, {each:.0f} s each",
                flush=True,
            )
            print(*others, sep="\n", end="\n" if others else "")
    sys.exit(bad)


if __name__ == "__main__":
    main(sys.argv[1:])
