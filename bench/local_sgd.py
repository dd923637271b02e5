"""Valid loss after local SGD against synchronous training: a small GPT-2 on the bytes of Shakespeare, CPU processes.

    torchrun --nproc-per-node 4 bench/local_sgd.py [STEPS] [EVERY] RATE,MOMENTUM ...
    torchrun --nproc-per-node 4 bench/local_sgd.py 640 32 0.7,0.9 1,0 1,0.5

All runs see the same batches and learning rates; the first one is synchronous.
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from textmill import corpora
from textmill.config import ModelConfig, ShapeConfig, TorchEngine, TrainConfig
from textmill.engines import EvalSums, open_engine, open_ranks
from textmill.models import initial_weights, open_family
from textmill.tokens.batches.batch import Batch
from textmill.training.run_length import lr_at

BATCH, LENGTH, LAYERS, WIDTH, VALID, SEED = 32, 64, 2, 64, 512, 1


def windows(tokens: Any, starts: Any, first: int) -> Batch:
    """Samples that start at these tokens; `first` is the place of the first one in the order of the run."""
    ids = tokens[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)
    return Batch(ids[:, :-1], ids[:, 1:], np.arange(first, first + len(ids)))


def valid_loss(steps: int, settings: dict[str, Any], ranks: Any) -> float:
    """Train, and return the mean loss on the last tenth of the text."""
    path = Path(next(iter(corpora.__path__))) / "tinyshakespeare.txt"
    text = np.frombuffer(path.read_bytes(), np.uint8)
    train, valid = np.split(text, [len(text) * 9 // 10])
    section = TrainConfig(batch=BATCH, length=LENGTH, steps=steps, learning_rate=3e-3, warmup=0.05, optimizer="adamw")
    engine_section = TorchEngine(device="cpu", precision="fp32", **settings)
    model = ModelConfig(
        family="gpt2", size="nano", shape=ShapeConfig(layers=LAYERS, heads=4, width=WIDTH, positions=LENGTH)
    )
    shape = open_family("gpt2").shape_of(model, vocab=256, eos_id=0)
    engine = open_engine(engine_section, section, shape, None, ranks)
    engine.load(initial_weights(shape, SEED), [], 0, "the first weights")
    random = np.random.default_rng(SEED)
    rows = engine.samples_of(BATCH)
    for step in range(steps):
        starts = random.integers(0, len(train) - LENGTH, BATCH)
        engine.train_step(windows(train, starts[rows], step * BATCH + rows.start), step, lr_at(step, section))
    sums = EvalSums(0.0, 0, 0)
    places = np.linspace(0, len(valid) - LENGTH - 1, VALID).astype(int)
    for first in range(0, VALID, 64):
        sums = sums + engine.eval_step(windows(valid, places[first : first + 64], first))
    return sums.loss / sums.loss_tokens


def main(steps: int, every: int, outer: list[str]) -> None:
    """Train synchronously, then with each outer step."""
    trials: dict[str, dict[str, Any]] = {"synchronous": {}}
    for word in outer:
        rate, momentum = map(float, word.split(","))
        step = {"sync_every": every, "outer_learning_rate": rate, "outer_momentum": momentum}
        trials[f"every {every} steps, outer rate {rate:g}, momentum {momentum:g}"] = step
    with closing(open_ranks(TorchEngine(device="cpu"))) as ranks:
        base = None
        for name, settings in trials.items():
            started = time.perf_counter()
            loss = valid_loss(steps, settings, ranks)
            base = loss if base is None else base
            if ranks.first:
                seconds = time.perf_counter() - started
                print(f"{name}: valid loss {loss:.4f}, {loss - base:+.4f}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
