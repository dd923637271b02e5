"""Measure how long a save blocks training (the copy to host memory), and how much it slows the steps that follow.

python bench/save_stall.py [size] [batch] [length] [steps between saves]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from textmill.checkpoints.writing import Snapshot, plan_files
from textmill.config import ModelConfig, RunConfig, TrainConfig
from textmill.engines import Engine, open_engine
from textmill.models import initial_weights, open_family
from textmill.tokens.batches.batch import Batch
from textmill.training.run_folder import Saver

VOCAB, SAVES = 50257, 3


def time_step(engine: Engine, batch: Batch, step: int) -> float:
    """Return the seconds of one step."""
    started = time.perf_counter()
    assert np.isfinite(engine.train_step(batch, step, 1e-4).loss)
    return time.perf_counter() - started


def main(size: str = "nano", batch: int = 2, length: int = 64, save_every: int = 500) -> int:
    """Measure steps without a save, then saves and the steps that run during them."""
    config = RunConfig(model=ModelConfig(size=size), train=TrainConfig(batch=batch, length=length))
    family = open_family(config.model.family)
    shape = family.shape_of(config.model, vocab=VOCAB, eos_id=0, length=length)
    engine = open_engine(config.engine, config.train, shape, config.model.lora)
    engine.load(initial_weights(shape, 1), [], 0, "the first weights")
    ids = np.random.default_rng(1).integers(0, VOCAB, (batch, length + 1)).astype(np.int32)
    tokens = Batch(inputs=ids[:, :-1], labels=ids[:, 1:], samples=np.arange(batch))
    without_save = [time_step(engine, tokens, step) for step in range(12)][2:]
    stalls, during_save = [], []
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder), keep=1, keep_every=None)
        for number in range(1, SAVES + 1):
            started = time.perf_counter()
            weight_plan, weights = plan_files("model", engine.weights())
            state_plan, state = plan_files("optimizer", engine.optimizer_state())
            saver.save(Snapshot(number, list(weights), list(state), {"step": number}, {}, (weight_plan, state_plan)))
            stalls.append(time.perf_counter() - started)
            during_save += [time_step(engine, tokens, 100 + step) for step in range(3)]
            saver.wait()
    step, stall = statistics.median(without_save), statistics.median(stalls)
    facts, fraction = engine.describe(), stall / (step * save_every)
    print(
        f"{size}, {facts['parameters']:,} parameters on {facts['device']}: {1000 * step:.1f} ms per step, "
        f"{1000 * statistics.median(during_save):.1f} ms during a save; a save stalls training for "
        f"{1000 * stall:.1f} ms, the first one for {1000 * stalls[0]:.1f} ms; {fraction:.3%} of the time "
        f"with a save every {save_every} steps"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2], *map(int, sys.argv[2:])))
