"""One process of a trial: the steps, and what it saw of them, written for who compares.

python -m textmill.verification.trial_process FOLDER ...
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from textmill.config import RunConfig
from textmill.engines import Engine, Named, open_engine, open_ranks
from textmill.errors import EXIT_DONE
from textmill.models import initial_weights, open_family
from textmill.models.lora import initial_adapters
from textmill.processes.exits import run_and_exit
from textmill.storage.files import write_json
from textmill.storage.tensor_files import encode_safetensors
from textmill.tokens.batches.batch import Batch
from textmill.verification.small_config import VOCAB, batches_of, handed_over, rate_of

SCALING = {"scale": 1024.0, "good": 0, "left": 2}
"""Where the loss scale of fp16 stands after the steps that it takes to come down, which would all be left out."""


def part(batch: Batch, rows: slice) -> Batch:
    """Some samples of a batch."""
    arrays = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: array[rows] for name, array in arrays.items() if array is not None})


def hash_of(named: Iterable[Named]) -> str:
    """One hash of all values by name."""
    digest = hashlib.sha256()
    for name, values in named:
        digest.update(name.encode() + values.tobytes())
    return digest.hexdigest()


def seen_by(engine: Engine, config: RunConfig, folder: Path) -> dict[str, Any]:
    """The numbers of every step; the first process writes what the first step left of the gradients."""
    rows, seen = engine.samples_of(config.train.batch), []
    for step, batch in enumerate(batches_of(config)):
        done = engine.train_step(part(batch, rows), step, rate_of(config))
        seen.append({"loss": done.loss, "norm": done.norm, "asked": done.asked})
        if step == 0:
            moments = [(name, values) for name, values in engine.moments() if not name.startswith("v/")]
            if engine.first:
                (folder / "gradients.safetensors").write_bytes(b"".join(encode_safetensors(moments)))
    sums = engine.eval_step(batch)
    return {
        "steps": seen,
        "valid": [sums.loss, sums.asked, sums.correct],
        "copies": engine.ranks.all_gather(hash_of(engine.weights())),
    }


def main(words: list[str]) -> int:
    """Run the config of each folder, one after the other, on the processes that were started together."""
    folders = [Path(word) for word in words]
    configs = [handed_over(folder) for folder in folders]
    ranks = open_ranks(configs[0])
    for config, folder in zip(configs, folders, strict=True):
        family = open_family(config.model.family)
        shape = family.shape_of(config.model, vocab=VOCAB, end=0)
        weights = [*initial_weights(shape, config.train.seed)]
        weights += initial_adapters(shape, config.model.lora, config.train.seed) if config.model.lora else []
        engine = open_engine(config, shape, ranks)
        engine.load(weights, [], 0, "the first weights", SCALING if config.engine.precision == "fp16" else None)
        seen = seen_by(engine, config, folder)
        if engine.first:
            write_json(folder / "seen.json", seen)
        engine.close()
    ranks.close()
    return EXIT_DONE


if __name__ == "__main__":
    run_and_exit(partial(main, sys.argv[1:]))
