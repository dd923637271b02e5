"""How long training stands still for a save: the copy to host memory; and how much slower steps are while the files are written.

python bench/save_stall.py [size] [batch] [length] [steps between saves]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from textmill.checkpoints.folders import Snapshot
from textmill.config import ModelConfig, RunConfig, TrainConfig
from textmill.engines import Engine, open_engine
from textmill.models import initial_weights, open_family
from textmill.tokens.batches.batch import Batch
from textmill.training.saving import Saver

VOCAB, SAVES = 50257, 3


def seconds_of_step(engine: Engine, batch: Batch, step: int) -> float:
    """One step, waited for."""
    began = time.perf_counter()
    assert np.isfinite(engine.train_step(batch, step, 1e-4).loss)
    return time.perf_counter() - began


def main(size: str = "nano", batch: int = 2, length: int = 64, save_every: int = 500) -> int:
    """Steps alone, then saves with steps beside them."""
    config = RunConfig(model=ModelConfig(size=size), train=TrainConfig(batch=batch, length=length))
    family = open_family(config.model.family)
    shape = family.shape_of(config.model, vocab=VOCAB, end=0, length=length)
    engine = open_engine(config, shape)
    engine.load(initial_weights(shape, 1), [], 0, "the first weights")
    ids = np.random.default_rng(1).integers(0, VOCAB, (batch, length + 1)).astype(np.int32)
    tokens = Batch(inputs=ids[:, :-1], labels=ids[:, 1:], samples=np.arange(batch))
    alone = [seconds_of_step(engine, tokens, step) for step in range(12)][2:]
    stalls, beside = [], []
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder), keep=1, keep_every=None)
        for number in range(1, SAVES + 1):
            began = time.perf_counter()
            saver.save(Snapshot(number, list(engine.weights()), list(engine.moments()), {"step": number}, {}))
            stalls.append(time.perf_counter() - began)
            beside += [seconds_of_step(engine, tokens, 100 + step) for step in range(3)]
            saver.wait()
    step, stall = statistics.median(alone), statistics.median(stalls)
    facts, share = engine.facts(), stall / (step * save_every)
    print(f"{size}, {facts['parameters']:,} parameters on {facts['device']}: a step {1000 * step:.1f} ms, "
          f"{1000 * statistics.median(beside):.1f} ms beside a save; stall of a save {1000 * stall:.1f} ms, the first "
          f"{1000 * stalls[0]:.1f} ms; {share:.3%} of the time with a save every {save_every} steps")  # fmt: skip
    return 0


if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(main(*words[:1], *map(int, words[1:])))
