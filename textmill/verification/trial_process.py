"""One process of a trial: trains the small config, and rank 0 writes the numbers for the comparison.

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

from textmill.config import RunConfig, TorchEngine, TrainConfig
from textmill.engines import Engine, open_engine, open_ranks
from textmill.errors import EXIT_DONE
from textmill.models import Shape, initial_weights
from textmill.models.lora import initial_adapters
from textmill.processes.ranks import Ranks
from textmill.processes.signals import run_and_exit
from textmill.storage.files import write_json
from textmill.storage.tensor_files import Named, encode_safetensors
from textmill.tokens.batches.batch import Batch
from textmill.verification.small_config import build_batches, learning_rate, read_config, trial_shape

LOSS_SCALE = {"scale": 1024.0, "good": 0, "left": 2}
"""The loss scale to start from in fp16: from the default, the first steps would overflow and be skipped."""


def select_rows(batch: Batch, rows: slice) -> Batch:
    """Some samples of a batch."""
    arrays = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: array[rows] for name, array in arrays.items() if array is not None})


def hash_tensors(named: Iterable[Named]) -> str:
    """One hash of all names and values."""
    digest = hashlib.sha256()
    for name, values in named:
        digest.update(name.encode() + values.tobytes())
    return digest.hexdigest()


def run_trial(engine: Engine, train: TrainConfig, learning_rate: float, folder: Path) -> dict[str, Any]:
    """Train and return the numbers of every step; rank 0 writes the first step's gradients, read from the momentum."""
    rows = engine.samples_of(train.batch)
    steps = []
    batches = build_batches(train.batch, isolate_documents=train.packed.isolate_documents)
    for step, batch in enumerate(batches):
        result = engine.train_step(select_rows(batch, rows), step, learning_rate)
        steps.append({"loss": result.loss, "norm": result.norm, "loss_tokens": result.loss_tokens})
        if step == 0:
            momentum = [(name, values) for name, values in engine.optimizer_state() if not name.startswith("v/")]
            if engine.first:
                (folder / "gradients.safetensors").write_bytes(b"".join(encode_safetensors(momentum)))
    sums = engine.eval_step(batch)
    return {
        "steps": steps,
        "valid": [sums.loss, sums.loss_tokens, sums.correct],
        "weight_hashes": engine.ranks.all_gather(hash_tensors(engine.weights())),
    }


def open_trial(config: RunConfig, shape: Shape, ranks: Ranks) -> Engine:
    """The engine of a small config. Compiled, it traces forward and backward, but generates no code: that would take
    minutes."""
    settings = config.engine
    compiled = isinstance(settings, TorchEngine) and settings.compile is True
    eager = settings.model_copy(update={"compile": False}) if compiled else settings
    engine = open_engine(eager, config.train, shape, config.model.lora, ranks)
    if compiled:
        # Imported here: other engines do not need torch.
        from textmill.engines.on_torch import OnTorch
        from textmill.models.base_torch import compile_parts

        assert isinstance(engine, OnTorch)
        engine.compiled = compile_parts(backend="aot_eager")
    return engine


def main(arguments: list[str]) -> int:
    """Run the config of each folder, one after the other, on the processes that were started together."""
    folders = [Path(argument) for argument in arguments]
    configs = [read_config(folder / "config.json") for folder in folders]
    ranks = open_ranks(configs[0].engine)
    for config, folder in zip(configs, folders, strict=True):
        shape = trial_shape(config.model)
        weights = [*initial_weights(shape, config.train.seed)]
        weights += initial_adapters(shape, config.model.lora, config.train.seed) if config.model.lora else []
        engine = open_trial(config, shape, ranks)
        engine.load(weights, [], 0, "the initial weights", LOSS_SCALE if config.engine.precision == "fp16" else None)
        rate = learning_rate(config.model.lora, config.engine.precision)
        result = run_trial(engine, config.train, rate, folder)
        if engine.first:
            write_json(folder / "result.json", result)
        engine.close()
    ranks.close()
    return EXIT_DONE


if __name__ == "__main__":
    run_and_exit(partial(main, sys.argv[1:]))
