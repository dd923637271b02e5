"""`textmill train` with its data, logging and saving against the bare engine on the same batches, and seconds to its first loss.

    python bench/whole_train.py [steps=200] [save=100] [first=1] [section.key=value ...]

The data are the quickstart's unless settings name others, such as, for one GPU:
corpus.sources=en.jsonl.xz tokenizer.use=gpt2 model.size=small train.length=1024 train.batch=64 engine.compile=true engine.micro_batch=64
AdamW updates unless another is named. The whole loop logs every 10 steps and saves every `save`. The bare engine runs half of its steps
before and half after it, since a hot card is slower; WARM steps of each run do not count. Then the command itself is started twice, with
empty caches of compiled code and of chosen products, and with those it left: seconds from its start to its word that it begins, and to
the first line of metrics.
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
from textmill.schedules import lr_at
from textmill.tokens.batches.from_config import open_batches
from textmill.tokens.splits import open_splits
from textmill.tokens.tokenize import tokenize
from textmill.training import loop, setup
from textmill.training.resuming import choose_start
from textmill.where import open_where

WARM = 20
"""Steps before the clock starts: they compile, and fill what is kept ahead."""
COMMAND = [sys.executable, "-c", "import sys; from textmill.cli import main; sys.exit(main())"]
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")


def bare(config: RunConfig, folder: Path) -> float:
    """Seconds of a step of the engine alone, its batches made before."""
    data = open_splits(config)
    start = choose_start(config, data, "yes", "latest")
    length = config.train.length or start.shape.positions
    batches = open_batches(config.train, data, length=length, folder=folder)
    ready = [batches.batch_at(step, slice(0, config.train.batch)) for step in range(8)]
    engine = open_engine(config, start.shape)
    engine.load(initial_weights(start.shape, 1), [], 0, "start")
    for step in range(WARM):
        last = engine.train_step(ready[step % 8], step, lr_at(step, config.train))
    float(last.loss)
    begun, counted = time.perf_counter(), (config.train.steps - WARM) // 2
    for step in range(WARM, WARM + counted):
        last = engine.train_step(ready[step % 8], step, lr_at(step, config.train))
    float(last.loss)
    spent = time.perf_counter() - begun
    engine.close()
    return spent / counted


def whole(config: RunConfig) -> float:
    """Seconds of a step of the loop; a step begins when the engine is called, just after all that was due after the one before."""
    called: list[float] = []
    opened = setup.open_engine

    def clocked(*given: Any) -> Engine:
        engine = opened(*given)
        step: Any = engine.train_step

        def train_step(*batch: Any) -> Any:
            called.append(time.perf_counter())
            return step(*batch)

        engine.train_step = train_step  # type: ignore[method-assign]
        return engine

    setup.open_engine = clocked
    try:
        loop.train(config, "yes")
    finally:
        setup.open_engine = opened
    return (called[-1] - called[WARM]) / (len(called) - 1 - WARM)


def first_loss(words: list[str], run: Path, caches: Path) -> tuple[float, float]:
    """Seconds from the start of the command until it says that it begins, all being loaded, and until its first line of metrics."""
    places = {"PYTHONUNBUFFERED": "1", **{name: str(caches / name) for name in CACHES}}
    said, metrics, begins = run.with_suffix(".txt"), run / "metrics.jsonl", 0.0
    begun = time.perf_counter()
    with said.open("w") as told:
        command = [*COMMAND, "train", *words, f"train.folder={run}", "--force"]
        process = subprocess.Popen(command, env={**os.environ, **places}, stdout=told, stderr=subprocess.STDOUT)
        while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
            time.sleep(0.01)
            begins = begins or (time.perf_counter() - begun if ", micro-batch " in said.read_text() else 0.0)
        spent = time.perf_counter() - begun
        process.terminate()
        process.wait()
    assert metrics.exists(), said.read_text()
    return begins, spent


def main(words: list[str]) -> None:
    """Measure, and print a line for each."""
    own = {"steps": 200, "save": 100, "first": 1}
    given = dict(word.split("=", 1) for word in words if "." not in word.partition("=")[0])
    own.update({name: int(value) for name, value in given.items()})
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        steps = WARM + own["steps"] + 1
        length = [
            f"train.steps={steps}",
            f"train.save_every={own['save']}",
            f"train.evaluate_every={10 * steps}",
            "train.log_every=10",
        ]
        adamw = ["train.optimizer=adamw", "train.learning_rate=1e-3"]
        said = [word for word in words if "." in word.partition("=")[0]]
        settings = [f"folder={root}", *length, *adamw, "train.evaluate_batches=1", *said]
        config = open_where("quickstart", settings).config
        prepare(config)
        tokenize(config)
        before, together, after = bare(config, root / "index"), whole(config), bare(config, root / "index")
        alone, tokens = (before + after) / 2, config.train.batch * (config.train.length or 1024)
        print(
            f"bare engine: {1e3 * before:.2f} ms a step before, {1e3 * after:.2f} after, {tokens / alone:,.0f} tokens/s"
        )
        print(
            f"textmill train: {1e3 * together:.2f} ms a step, {tokens / together:,.0f} tokens/s, {alone / together:.3f} of the bare engine"
        )
        for kind in ("cold", "warm") if own["first"] else ():
            begins, spent = first_loss(["quickstart", *settings], root / kind, root / "caches")
            print(
                f"{kind}: {spent:.1f} s from the start of the command to its first loss, {begins:.1f} of them before the first step",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
