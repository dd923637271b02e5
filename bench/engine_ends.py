"""Runs of each engine one after another, each a step further than the last: how many hang, fail, or leave a process behind.

python bench/engine_ends.py [runs] [name,name...]      (20 of each in ENGINES if not said)
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SETTINGS = [
    "tokenizer.vocab=300", "model.shape.heads=2", "model.shape.width=32", "train.length=32", "train.batch=4", "train.warmup=0",
    "train.evaluate_batches=1", "train.checkpoints.keep=1", "train.optimizer=adamw", "train.learning_rate=3e-3", "engine.device=cpu",
]  # fmt: skip
ENGINES = {
    "torch": (1, ["engine.kind=torch"]),
    "torch on 2 processes": (2, ["engine.kind=torch", "engine.mesh.shard=2"]),
    "deepspeed": (1, ["engine.kind=deepspeed", "engine.zero=2"]),
    "deepspeed on 2 processes": (2, ["engine.kind=deepspeed", "engine.zero=3"]),
    "jax on 2 devices": (1, ["engine.kind=jax", "engine.mesh.shard=2"]),
}
"""By name: processes, and what each is told."""
LONGEST = 600
"""Seconds after which a run is taken to hang."""
REAPER = 36
"""prctl's word for: who has lost his parent becomes a child of this process, and not of the machine's first."""


def ended(command: list[str], environment: dict[str, str]) -> str:
    """How a run ended: well, badly, or not at all; and whom it left behind."""
    with tempfile.TemporaryFile("w+") as said, left_behind() as left:
        try:
            code = subprocess.run(command, env=environment, stdout=said, stderr=said, timeout=LONGEST).returncode
        except subprocess.TimeoutExpired:
            code = None
        said.seek(0)
        how = "hung" if code is None else f"failed with {code}: {said.read()[-3000:]}" if code else "well"
    return f"{how}, left {len(left)} behind ({'; '.join(left.values())})" if left else how


@contextmanager
def left_behind() -> Iterator[dict[int, str]]:
    """Whom the work inside leaves: processes that outlive it, and zombies that nobody waited for; they are ended, and known after it."""
    left: dict[int, str] = {}
    if sys.platform != "linux":
        yield left
        return
    known, prctl = children(), ctypes.CDLL(None).prctl
    prctl(REAPER, 1, 0, 0, 0)
    try:
        yield left
        while found := {process: state for process, state in children().items() if process not in known}:
            left |= found
            for process in found:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
    finally:
        prctl(REAPER, 0, 0, 0, 0)


def children() -> dict[int, str]:
    """The processes whose parent this one is: the name of each, and whether it is a zombie."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has just ended
        state, parent = rest.split()[:2]
        if int(parent) == os.getpid():
            found[int(path.parent.name)] = f"{name}, {'a zombie' if state == 'Z' else 'alive'}"
    return found


def main(words: list[str]) -> None:
    """Prepare once, then train again and again with each engine."""
    runs, names = int(words[0]) if words else 20, words[1].split(",") if len(words) > 1 else [*ENGINES]
    bad = False
    with tempfile.TemporaryDirectory() as root:
        plain = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "JAX_PLATFORMS": "cpu",
        }
        programs = {"JAX_COMPILATION_CACHE_DIR": f"{root}/programs", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
        environment = {**plain, **programs, "XLA_FLAGS": flags}
        asked = ["quickstart", f"folder={root}", *SETTINGS]
        for command in ("prepare", "tokenize"):
            subprocess.run(
                [sys.executable, "-m", "textmill", command, *asked], env=environment, check=True, capture_output=True
            )
        for number, name in enumerate(names):
            processes, engine = ENGINES[name]
            launcher = (
                ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
                if processes > 1
                else []
            )
            command = [
                sys.executable,
                *launcher,
                "-m",
                "textmill",
                "train",
                *asked,
                *engine,
                f"train.folder={root}/{number}",
            ]
            start = time.perf_counter()
            ways = [ended([*command, f"train.steps={run}"], environment) for run in range(1, runs + 1)]
            each = (time.perf_counter() - start) / runs
            others = [way for way in ways if way != "well"]
            bad = bad or bool(others)
            told = f"{len(ways) - len(others)} of {runs} runs ended by themselves with code 0 and left nothing, {each:.1f} s each"
            print(f"{name}: {told}", *others, sep="\n", flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main(sys.argv[1:])
