"""Record what a change of structure must not change: losses, weights, token ids, texts, figures, exported tensors.

    python bench/equality.py OUT.json [--only PATTERN] [--jobs 2] [--keep FOLDER]
    python bench/equality.py OUT.json --compare OTHER.json [--only PATTERN]

The first form runs textmill's commands on small cases, each with one CPU thread, and writes the results: floats as
Python prints them, which is exact, and SHA-256 digests of tensors, token ids and documents. The second form compares
two files of results: each value that differs is printed, and each that one lacks. PATTERN, a part of a name or one
with wildcards, or several of them separated by commas, selects cases in both. The exit code is 1 if a case failed or
something differs, else 0. Results are equal only on the same kind of machine with the same packages.

The cases are in equality_cases.py; they use commands and settings only, so that the code behind them can move.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.equality_cases import ENGINES, Case, all_cases
from bench.equality_files import read_files, read_printed, read_run
from bench.equality_inputs import write_inputs

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0",
}
PRELOADED = {
    "torch": ("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "tokenizers"),
    "deepspeed": ("torch", "deepspeed"),
    "jax": ("jax", "optax"),
}
"""Modules that every process of an engine needs. They are imported once, then processes are forked."""
LONGEST = 3000
"""Seconds that a command may take, on a busy machine."""


def run_command(words: list[str], case: Case, log: str) -> str:
    """Run `textmill WORDS` in a fork for each rank; return what it prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = case.ranks if case.engine != "jax" else 1
    environment = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    pids = []
    for rank in map(str, range(processes)):
        own = {**environment, "RANK": rank, "LOCAL_RANK": rank} if processes > 1 else {}
        if case.ranks > processes:
            own["XLA_FLAGS"] = f"{ENVIRONMENT['XLA_FLAGS']} --xla_force_host_platform_device_count={case.ranks}"
        pids.append(os.fork() or _become(words, own, case.stdin, f"{log}.{rank}"))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        errors = "".join(Path(f"{log}.{rank}.err").read_text()[-1500:] for rank in range(processes))
        raise RuntimeError(f"textmill {words[0]} ended with {codes}: {errors}")
    return Path(f"{log}.0.out").read_text()


def _become(words: list[str], environment: dict[str, str], stdin: str, log: str) -> int:
    """In a fork: run a command as `python -m textmill` does, and end."""
    code = 1
    try:
        signal.alarm(LONGEST)
        Path(f"{log}.in").write_text(stdin)
        for number, ending in enumerate(("in", "out", "err")):
            path = f"{log}.{ending}"
            os.dup2(os.open(path, os.O_RDONLY if ending == "in" else os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdin = open(0, closefd=False)  # a pool's process has another one
        os.environ.update(environment)
        sys.argv = ["textmill", *words]
        runpy.run_module("textmill", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_case(name: str) -> dict[str, Any]:
    """Wait for the cases that this one needs, run its commands, read what they wrote."""
    case = all_cases()[name]
    done = Path("done")
    before = sum(os.times()[2:4])
    while any(not (done / need).exists() for need in case.needs):
        time.sleep(0.05)
    try:
        result: dict[str, Any] = {}
        for number, words in enumerate(case.commands):
            printed = run_command(words, case, f"logs/{name}.{number}")
            if case.prints:
                result["printed"] = read_printed(printed)
        for path in map(Path, case.reads):
            result |= read_run(path) if (path / "metrics.jsonl").exists() else read_files(path)
        if not result:
            raise RuntimeError(f"nothing to read in {case.reads}")
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    (done / name).touch()
    spent = sum(os.times()[2:4]) - before
    print(f"{spent:6.1f} s  {name}{'  FAILED' if 'error' in result else ''}", flush=True)
    return result


def preload(engine: str) -> None:
    """Import what the forks of this process need."""
    for name in PRELOADED[engine]:
        with suppress(ImportError):
            importlib.import_module(name)


def matches(name: str, pattern: str) -> bool:
    """Whether one of the patterns selects this case."""
    return any(part in name or fnmatch.fnmatch(name, part) for part in pattern.split(","))


def select_cases(pattern: str) -> tuple[list[str], list[str]]:
    """The names of the selected cases, and of all that must run, in order."""
    cases = all_cases()
    chosen = [name for name in cases if matches(name, pattern)]
    needed, waiting = set(chosen), list(chosen)
    while waiting:
        more = set(cases[waiting.pop()].needs) - needed
        needed |= more
        waiting += more
    return chosen, [name for name in cases if name in needed]


def run_cases(pattern: str, jobs: int) -> dict[str, Any]:
    """Run the selected cases in the current folder, one engine after the other."""
    chosen, needed = select_cases(pattern)
    package = importlib.util.find_spec("textmill")
    assert package is not None
    assert package.origin is not None
    print(f"{len(needed)} cases of {package.origin}", flush=True)
    text = next(Path(package.origin).parent.rglob("tinyshakespeare.txt"))
    write_inputs(Path("texts"), text.read_text(encoding="utf-8"))
    Path("empty.yaml").write_text("folder: .\n")
    for folder in ("done", "logs", "out"):
        Path(folder).mkdir()
    cases = all_cases()
    found: dict[str, Any] = {}
    for engine in ENGINES:
        names = [name for name in needed if cases[name].engine == engine]
        with ProcessPoolExecutor(jobs, get_context("fork"), preload, (engine,)) as pool:
            found |= dict(zip(names, pool.map(run_case, names), strict=True))
    return {name: found[name] for name in chosen}


def load_results(path: Path, pattern: str) -> dict[str, Any]:
    """The selected cases of a file of results."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return {name: result for name, result in found.items() if matches(name, pattern)}


def flatten_values(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every single value with its place."""
    if isinstance(value, dict | list):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flatten_values(f"{name}  {key}" if isinstance(value, dict) else f"{name}[{key}]", one)
    else:
        yield name, value


def compare(one: dict[str, Any], other: dict[str, Any]) -> int:
    """Print what differs; return the exit code."""
    values, others = (dict(pair for name in tree for pair in flatten_values(name, tree[name])) for tree in (one, other))
    missing = object()
    different = 0
    for name in sorted({*values, *others}):
        pair = [found.get(name, missing) for found in (values, others)]
        if pair[0] != pair[1]:
            different += 1
            print(f"{name}: {' | '.join('missing' if value is missing else repr(value) for value in pair)}")
    print(f"{len(values) - different} values are equal" if not different else f"{different} values differ")
    return 1 if different or not values else 0


def main() -> int:
    """Run cases, or compare two files of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, metavar="OUT.json")
    parser.add_argument("--only", default="*", metavar="PATTERN")
    parser.add_argument("--compare", type=Path, metavar="OTHER.json")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="a new folder for all files; default: a temporary one")
    given = parser.parse_args()
    if given.compare:
        return compare(*(load_results(path, given.only) for path in (given.results, given.compare)))
    results = given.results.absolute()
    os.environ.update(ENVIRONMENT)
    started = time.monotonic()
    root = given.keep or Path(tempfile.mkdtemp())  # a TemporaryDirectory would be removed by the first fork that ends
    root.mkdir(parents=True, exist_ok=True)
    os.chdir(root)
    found = run_cases(given.only, given.jobs)
    if not given.keep:
        shutil.rmtree(root)
    results.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    failed = {name: result["error"] for name, result in found.items() if "error" in result}
    for name, error in failed.items():
        print(f"{name}: {error}")
    print(f"{len(found) - len(failed)} of {len(found)} cases in {time.monotonic() - started:.0f} s: {results}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
