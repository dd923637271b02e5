"""A small net with batches and engines, for the tests of engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import JaxEngine, LoraConfig, ModelConfig, RunConfig, ShapeConfig, TorchEngine, TrainConfig
from textmill.config.engines import DeepSpeedEngine
from textmill.engines import Engine, open_engine
from textmill.models import initial_weights, open_family
from textmill.models.lora import initial_adapters
from textmill.storage.tensor_files import Named
from textmill.tokens.batches.batch import IGNORED, Batch

ENGINES = sorted(
    path.stem.removeprefix("on_") for path in (Path(__file__).parents[2] / "textmill" / "engines").glob("on_*.py")
)


def engines_of(family: str) -> list[str]:
    """Return the engines that have a net of a family in the package."""
    folder = Path(__file__).parents[2] / "textmill" / "models" / family
    return [kind for kind in ENGINES if kind != "jax" or (folder / "net_jax.py").is_file()]


VOCAB, LENGTH, ROWS = 150, 24, 8


MAKE = {"torch": TorchEngine, "jax": JaxEngine, "deepspeed": DeepSpeedEngine}


LORA = LoraConfig(rank=4, alpha=6.0, dropout=0.2, targets=["mlp", "1"])
"""Both matrices of every MLP, and all of the second block."""
BERT_TARGETS = ["intermediate.dense", "layer.*.output.dense", "1"]
"""The same of a family that names them otherwise."""
MYNET = str(Path(__file__).parents[2] / "examples" / "mynet.py")
FAMILY = ["gpt2"]
"""The family of `config_of`; the fixture `kind` sets it for the tests that every family passes."""


def config_of(
    kind: str, *, dropout: float = 0.0, micro_batch: int = ROWS, lora: LoraConfig | None = None, **train: Any
) -> RunConfig:
    heads = {"heads": 4, "kv_heads": 2} if FAMILY[0] == "llama" else {"heads": 2}
    shape = ShapeConfig(layers=2, width=32, positions=LENGTH, dropout=dropout, **heads)
    model = ModelConfig(family=FAMILY[0], size={"gpt2": "nano", "bert": "tiny"}.get(FAMILY[0], "small"), shape=shape)
    if lora is not None and FAMILY[0] == "bert":
        lora = lora.model_copy(update={"targets": BERT_TARGETS})
    settings = {"batch": ROWS, "length": LENGTH, "learning_rate": 1e-2, **train}
    engine = MAKE[kind](device="cpu", micro_batch=micro_batch)
    config = RunConfig(model=model, train=TrainConfig(**settings), engine=engine)
    return adapting(config, lora)


def adapting(config: RunConfig, lora: LoraConfig | None) -> RunConfig:
    """Return the config with adapters, on initial weights."""
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})


def started(config: RunConfig) -> Engine:
    family = open_family(config.model.family)
    shape = family.shape_of(config.model, vocab=VOCAB, eos_id=0)
    engine = open_engine(config.engine, config.train, shape, config.model.lora)
    engine.load(first_of(config, shape), [], 0, "the first weights")
    return engine


def first_of(config: RunConfig, shape: Any) -> list[Named]:
    """Return all initial weights, with those of adapters."""
    lora = config.model.lora
    return [*initial_weights(shape, 5), *(initial_adapters(shape, lora, 5) if lora else [])]


def batch_of(step: int, *, unequal: bool = True) -> Batch:
    """Samples with different numbers of loss tokens, one with none."""
    dice = np.random.default_rng(step)
    ids = (dice.integers(0, 12, (ROWS, LENGTH + 1)) ** 2).astype(np.int32) % VOCAB
    labels = ids[:, 1:].copy()
    if unequal:
        for row in range(ROWS):
            labels[row, row * LENGTH // ROWS :] = IGNORED
    return Batch(inputs=ids[:, :-1], labels=labels, samples=np.arange(step * ROWS, (step + 1) * ROWS))


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Return some samples of a batch."""
    return Batch(batch.inputs[rows], batch.labels[rows], batch.samples[rows])


def run(engine: Engine, steps: range, **options: Any) -> list[float]:
    return [engine.train_step(batch_of(step, **options), step, 1e-2).loss for step in steps]
