"""Run each engine many times, each run one step longer than the last; count runs that hang, fail or leave a process.

python bench/engine_exits.py [runs] [name,name...]      (default: 20 runs of each in ENGINES)
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
    "tokenizer.vocab=300",
    "model.shape.heads=2",
    "model.shape.width=32",
    "train.length=32",
    "train.batch=4",
    "train.warmup=0",
    "train.evaluate_batches=1",
    "train.checkpoints.keep=1",
    "train.optimizer=adamw",
    "train.learning_rate=3e-3",
    "engine.device=cpu",
]
ENGINES = {
    "torch": (1, ["engine.kind=torch"]),
    "torch on 2 processes": (2, ["engine.kind=torch", "engine.mesh.shard=2"]),
    "deepspeed": (1, ["engine.kind=deepspeed", "engine.zero=2"]),
    "deepspeed on 2 processes": (2, ["engine.kind=deepspeed", "engine.zero=3"]),
    "jax on 2 devices": (1, ["engine.kind=jax", "engine.mesh.shard=2"]),
}
"""By name: number of processes, and settings."""
LONGEST = 600
"""Seconds after which a run counts as hanging."""
SUBREAPER = 36
"""prctl's PR_SET_CHILD_SUBREAPER: orphaned processes become children of this process."""


def run_to_exit(command: list[str], environment: dict[str, str]) -> str:
    """Run a command; return "ok" or how it failed or hung, and which processes it left."""
    with tempfile.TemporaryFile("w+") as output, end_leftovers() as left:
        try:
            code = subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=LONGEST).returncode
        except subprocess.TimeoutExpired:
            code = None
        output.seek(0)
        result = "hung" if code is None else f"failed with {code}: {output.read()[-3000:]}" if code else "ok"
    return f"{result}, left processes: {'; '.join(left.values())}" if left else result


@contextmanager
def end_leftovers() -> Iterator[dict[int, str]]:
    """Kill the processes that the block leaves running, and reap its zombies; yield a dict that then describes them."""
    left: dict[int, str] = {}
    if sys.platform != "linux":
        yield left
        return
    known, prctl = list_children(), ctypes.CDLL(None).prctl
    prctl(SUBREAPER, 1, 0, 0, 0)
    try:
        yield left
        while found := {process: state for process, state in list_children().items() if process not in known}:
            left |= found
            for process in found:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
    finally:
        prctl(SUBREAPER, 0, 0, 0, 0)


def list_children() -> dict[int, str]:
    """Return the child processes of this process: the name of each, and whether it is a zombie."""
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


def main(arguments: list[str]) -> None:
    """Prepare once, then train repeatedly with each engine."""
    runs = int(arguments[0]) if arguments else 20
    names = arguments[1].split(",") if len(arguments) > 1 else [*ENGINES]
    failed = False
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
        common = ["quickstart", f"folder={root}", *SETTINGS]
        for command in ("prepare", "tokenize"):
            subprocess.run(
                [sys.executable, "-m", "textmill", command, *common], env=environment, check=True, capture_output=True
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
                *common,
                *engine,
                f"train.folder={root}/{number}",
            ]
            start = time.perf_counter()
            results = [run_to_exit([*command, f"train.steps={run}"], environment) for run in range(1, runs + 1)]
            each = (time.perf_counter() - start) / runs
            failures = [result for result in results if result != "ok"]
            failed = failed or bool(failures)
            good = len(results) - len(failures)
            summary = f"{good} of {runs} runs exited with code 0 and left no process, {each:.1f} s each"
            print(f"{name}: {summary}", *failures, sep="\n", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
