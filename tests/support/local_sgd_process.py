"""One worker in the tests of local SGD: local_sgd_process.py FOLDER."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.layout_process import LENGTH, ROWS, VOCAB, config_of, shape_of, started, state_of
from tests.support.masked_batches import rows_of
from textmill.config import RunConfig
from textmill.engines import open_engine, open_ranks
from textmill.processes.signals import run_and_exit
from textmill.tokens.batches.batch import Batch

EVERY, RATE, MOMENTUM, STEPS = 3, 0.6, 0.8, 8
SAVED = (4, 6)
"""Steps after which the run is resumed: between two synchronisations, and at one."""


def local_config() -> RunConfig:
    """Two workers; without clipping, which reads the norms of both."""
    config = config_of({"replicate": 2}, clip=0.0)
    local = {"sync_every": EVERY, "outer_learning_rate": RATE, "outer_momentum": MOMENTUM}
    return config.model_copy(update={"engine": config.engine.model_copy(update=local)})


def full_batch(step: int) -> Batch:
    """Samples in which every token has a label."""
    ids = (np.random.default_rng(step).integers(0, 12, (ROWS, LENGTH + 1)) ** 2).astype(np.int32) % VOCAB
    return Batch(ids[:, :-1], ids[:, 1:], np.arange(step * ROWS, (step + 1) * ROWS))


def trained(engine: Any, steps: range, rows: slice) -> list[float]:
    """Train on some rows of each batch; return the losses."""
    return [float(engine.train_step(rows_of(full_batch(step), rows), step, 1e-3).loss) for step in steps]


def evaluated(engine: Any) -> list[float]:
    """Return the sums of an evaluation."""
    sums = engine.eval_step(full_batch(50))
    return [sums.loss, sums.loss_tokens, sums.correct]


def main(folder: Path) -> int:
    """Train, with a resume from the state after each of SAVED."""
    config = local_config()
    with closing(open_ranks(config.engine)) as ranks:
        engine = started(config, ranks)
        own = engine.samples_of(ROWS)
        numbers: dict[str, Any] = {"steps": [], "resumed": {}}
        states = {}
        for step in range(STEPS):
            numbers["steps"] += trained(engine, range(step, step + 1), own)
            if step + 1 in SAVED:
                numbers[f"valid-{step + 1}"] = evaluated(engine)
                states[step + 1] = state_of(engine)
        numbers["checksums"] = ranks.all_gather(engine.replica_checksums())
        last = state_of(engine)
        for saved, state in states.items():
            other = open_engine(config.engine, config.train, shape_of(config), None, ranks)
            plain = [(name, values) for name, values in state.items() if "/" not in name]
            other.load(plain, [(name, values) for name, values in state.items() if "/" in name], saved, "saved")
            assert evaluated(other) == numbers[f"valid-{saved}"]
            losses = trained(other, range(saved, STEPS), own)
            end = state_of(other)
            same = end.keys() == last.keys() and all(np.array_equal(end[name], last[name]) for name in last)
            numbers["resumed"][saved] = [losses, same]
        if ranks.first:
            for saved, state in states.items():
                np.savez(folder / f"state-{saved}.npz", **state)
            (folder / "numbers.json").write_text(json.dumps(numbers))
    return 0


if __name__ == "__main__":
    run_and_exit(lambda: main(Path(sys.argv[1])))
