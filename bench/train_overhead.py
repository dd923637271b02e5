"""`textmill train` with data, logging and saving, compared with the engine alone; seconds to the first loss.

    python bench/train_overhead.py [steps=200] [save=100] [first=1] [section.key=value ...]

The data are those of the quickstart recipe unless settings change it; for one GPU for example:
corpus.sources=en.jsonl.xz tokenizer.use=gpt2 model.size=small train.length=1024 train.batch=64 engine.compile=true
engine.micro_batch=64
The optimizer is AdamW unless set. The loop logs every 10 steps and saves every `save` steps. The engine alone runs half
of its steps before and half after the loop, because a hot GPU is slower; the first WARM steps of each run do not count.

Then (unless first=0) the command itself is started twice: with empty caches of compiled code and matmul algorithms, and
with the caches of the first start. Prints the seconds from its start to the end of loading, and to the first metrics.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from textmill.config import RunConfig
from textmill.corpus.prepare import prepare
from textmill.engines import Engine, open_engine
from textmill.models import initial_weights
from textmill.tokens.batches.loader import open_batches
from textmill.tokens.splits import open_splits
from textmill.tokens.tokenize import tokenize
from textmill.training import loop
from textmill.training.run_length import lr_at
from textmill.training.start import choose_start
from textmill.where import open_where

WARM = 20
"""Steps before the clock starts: they compile and fill the prefetch queue."""
COMMAND = [sys.executable, "-c", "import sys; from textmill.cli import main; sys.exit(main())"]
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")


def measure_engine(config: RunConfig, folder: Path) -> float:
    """Return the seconds per step of the engine alone, with batches built beforehand."""
    data = open_splits(config)
    start = choose_start(config, data, "yes", "latest")
    length = config.train.length or start.shape.positions
    batches = open_batches(config.train, data, length=length, folder=folder)
    ready = [batches.batch_at(step, slice(0, config.train.batch)) for step in range(8)]
    engine = open_engine(config.engine, config.train, start.shape, config.model.lora)
    engine.load(initial_weights(start.shape, 1), [], 0, "start")
    for step in range(WARM):
        last = engine.train_step(ready[step % 8], step, lr_at(step, config.train))
    float(last.loss)
    started, counted = time.perf_counter(), (config.train.steps - WARM) // 2
    for step in range(WARM, WARM + counted):
        last = engine.train_step(ready[step % 8], step, lr_at(step, config.train))
    float(last.loss)
    spent = time.perf_counter() - started
    engine.close()
    return spent / counted


def measure_train(config: RunConfig) -> float:
    """Return the seconds per step of the loop, from one call of the engine to the next, with logging and saving."""
    calls: list[float] = []
    original = loop.open_engine

    def open_timed_engine(*arguments: Any) -> Engine:
        engine = original(*arguments)
        step: Any = engine.train_step

        def train_step(*batch: Any) -> Any:
            calls.append(time.perf_counter())
            return step(*batch)

        engine.train_step = train_step  # type: ignore[method-assign]
        return engine

    loop.open_engine = open_timed_engine
    try:
        loop.train(config, "yes")
    finally:
        loop.open_engine = original
    return (calls[-1] - calls[WARM]) / (len(calls) - 1 - WARM)


def time_to_first_loss(arguments: list[str], run: Path, caches: Path) -> tuple[float, float]:
    """Start the command; return the seconds until everything is loaded, and until the first line of metrics."""
    environment = {"PYTHONUNBUFFERED": "1", **{name: str(caches / name) for name in CACHES}}
    log, metrics, loaded = run.with_suffix(".txt"), run / "metrics.jsonl", 0.0
    started = time.perf_counter()
    with log.open("w") as output:
        command = [*COMMAND, "train", *arguments, f"train.folder={run}", "--force"]
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT)
        while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
            time.sleep(0.01)
            loaded = loaded or (time.perf_counter() - started if ", micro-batch " in log.read_text() else 0.0)
        spent = time.perf_counter() - started
        process.terminate()
        process.wait()
    assert metrics.exists(), log.read_text()
    return loaded, spent


def main(arguments: list[str]) -> None:
    """Measure and print a line for each measurement."""
    options = {"steps": 200, "save": 100, "first": 1}
    given = dict(argument.split("=", 1) for argument in arguments if "." not in argument.partition("=")[0])
    options.update({name: int(value) for name, value in given.items()})
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        steps = WARM + options["steps"] + 1
        length = [
            f"train.steps={steps}",
            f"train.save_every={options['save']}",
            f"train.evaluate_every={10 * steps}",
            "train.log_every=10",
        ]
        adamw = ["train.optimizer=adamw", "train.learning_rate=1e-3"]
        changes = [argument for argument in arguments if "." in argument.partition("=")[0]]
        settings = [f"folder={root}", *length, *adamw, "train.evaluate_batches=1", *changes]
        config = open_where("quickstart", settings).config
        prepare(config)
        tokenize(config)
        before = measure_engine(config, root / "index")
        loop_seconds = measure_train(config)
        after = measure_engine(config, root / "index")
        mean, tokens = (before + after) / 2, config.train.batch * (config.train.length or 1024)
        print(
            f"engine alone: {1e3 * before:.2f} ms per step before, {1e3 * after:.2f} after, "
            f"{tokens / mean:,.0f} tokens/s"
        )
        print(
            f"textmill train: {1e3 * loop_seconds:.2f} ms per step, {tokens / loop_seconds:,.0f} tokens/s, "
            f"{mean / loop_seconds:.3f} of the engine alone"
        )
        for kind in ("cold", "warm") if options["first"] else ():
            loaded, spent = time_to_first_loss(["quickstart", *settings], root / kind, root / "caches")
            print(
                f"{kind} caches: first loss after {spent:.1f} s, {loaded:.1f} of them before the first step", flush=True
            )


if __name__ == "__main__":
    main(sys.argv[1:])
