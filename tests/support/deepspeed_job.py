"""One rank of a launched DeepSpeed test: `python -m tests.support.deepspeed_job JOB.json` does the runs of the job.

A run has engine settings, a range of steps, a file to start from (default: initial weights), a file for its state.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.engine_runs import LORA, MAKE, ROWS, VOCAB, batch_of, config_of, first_of, rows_of
from textmill.engines import open_engine, open_ranks
from textmill.models import open_family
from textmill.processes.ranks import Ranks
from textmill.processes.signals import run_and_exit
from textmill.tokens.batches.blend import BatchSizes

LR = 1e-2


def do_run(run: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Train; return the losses, and whether the loaded state was read back unchanged."""
    rows = run.get("rows", ROWS)
    lora = LORA if run.get("lora") else None
    base = config_of(
        "torch", dropout=run.get("dropout", 0.0), batch=rows, micro_batch=1, lora=lora, **run.get("train", {})
    )
    section = MAKE[run["engine"].get("kind", "deepspeed")](device="cpu", **run["engine"])
    config = base.model_copy(update={"engine": section})
    family = open_family("gpt2")
    shape = family.shape_of(config.model, vocab=VOCAB, eos_id=0)
    with closing(open_engine(config.engine, config.train, shape, config.model.lora, ranks)) as engine:
        if run.get("start"):
            state = np.load(Path(run["start"]))
            weights = [(name.removeprefix("w:"), values) for name, values in state.items() if name.startswith("w:")]
            moments = [(name, values) for name, values in state.items() if not name.startswith(("w:", "updates"))]
            engine.load(weights, moments, int(state["updates"]), "saved")
            same = all(np.array_equal(dict(weights)[name], values) for name, values in engine.weights())
            same = same and all(
                np.array_equal(dict(moments)[name], values) for name, values in engine.optimizer_state()
            )
        else:
            engine.load(first_of(config, shape), [], 0, "the first weights")
            same = True
        sizes = BatchSizes(rows, config.train.batch_rampup)
        mine = {step: engine.samples_of(sizes.size_at(step)) for step in range(*run["steps"])}
        losses = [engine.train_step(rows_of(batch_of(step), own), step, LR).loss for step, own in mine.items()]
        if run.get("save"):

            def kept(_: str) -> bool:
                return ranks.first

            state = {
                **{f"w:{name}": values for name, values in engine.weights(kept)},
                **dict(engine.optimizer_state(kept)),
            }
            if ranks.first:
                np.savez(run["save"], updates=engine.updates(), **state)
            ranks.any(False)  # the others wait until the file is there
        sums = engine.eval_step(batch_of(99))
        return {
            "losses": losses,
            "same": same,
            "valid": [sums.loss, sums.loss_tokens, sums.correct],
            "updates": engine.updates(),
        }


def main(path: Path) -> int:
    """Do every run of the job; the first rank writes the results."""
    job = json.loads(path.read_text())
    with closing(open_ranks(config_of("torch").engine)) as ranks:
        found = [do_run(run, ranks) for run in job]
        if ranks.first:
            path.with_suffix(".out").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    run_and_exit(lambda: main(Path(sys.argv[1])))
