"""One rank in the tests of layouts: layout_process.py FOLDER LAYOUT..."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.masked_batches import masked_batch, rows_of
from textmill.config import LoraConfig, ModelConfig, MuonConfig, RunConfig, ShapeConfig, TorchEngine, TrainConfig
from textmill.config.engines import MeshConfig
from textmill.engines import Engine, open_engine, open_ranks
from textmill.models import initial_weights, open_family
from textmill.models.lora import initial_adapters
from textmill.processes.signals import run_and_exit
from textmill.tokens.batches.batch import IGNORED, Batch

VOCAB, LENGTH, ROWS, STEPS, SAVED, MORE = 150, 24, 8, 7, 4, 3
LORA = LoraConfig(rank=4, alpha=6.0, dropout=0.2)
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp-2": {"replicate": 2},
    "shard-2": {"shard": 2},
    "shard-kept-2": {"shard": 2, "keep_gathered": True},
    "tensor-2": {"tensor": 2, "sequence_parallel": False},
    "sequence-2": {"tensor": 2},
    "ddp-2-shard-2": {"replicate": 2, "shard": 2},
    "shard-2-sequence-2": {"shard": 2, "tensor": 2},
    "shard-kept-2-sequence-2": {"shard": 2, "tensor": 2, "keep_gathered": True},
    "ddp-2-tensor-2": {"replicate": 2, "tensor": 2, "sequence_parallel": False},
    "llama-shard-2": {"shard": 2},
    "llama-tensor-2": {"tensor": 2, "sequence_parallel": False},
    "llama-sequence-2": {"tensor": 2},
    "bert-ddp-2": {"replicate": 2},
    "bert-shard-2": {"shard": 2},
    "bert-tensor-2": {"tensor": 2, "sequence_parallel": False},
    "bert-sequence-2": {"tensor": 2},
    "pipeline-2": {"pipeline": 2},
    "llama-gpipe-2": {"pipeline": 2, "schedule": "gpipe"},
    "bert-interleaved-2": {"pipeline": 2, "schedule": "interleaved"},
    "interleaved-2-shard-2": {"pipeline": 2, "shard": 2, "schedule": "interleaved"},
    "llama-pipeline-2-sequence-2": {"pipeline": 2, "tensor": 2},
    "pipeline-2-ddp-2-sequence-2": {"pipeline": 2, "replicate": 2, "tensor": 2},
    "llama-pipeline-2-shard-2-sequence-2": {"pipeline": 2, "shard": 2, "tensor": 2},
    "bert-pipeline-2-ddp-2-shard-2": {"pipeline": 2, "replicate": 2, "shard": 2},
}
"""Meshes by name; those that start with bert have masked batches with packed pairs, those that start with llama have
grouped queries and norms of queries and keys, the others are for GPT-2."""
LLAMA = {"kv_heads": 2, "qk_norm": True}


def processes_of(name: str) -> int:
    """Return how many ranks a layout needs."""
    mesh = LAYOUTS[name]
    return int(mesh.get("replicate", 1) * mesh.get("shard", 1) * mesh.get("tensor", 1) * mesh.get("pipeline", 1))


def family_of(name: str) -> str:
    """Return the model family of a layout."""
    return next((family for family in ("bert", "llama") if name.startswith(family)), "gpt2")


def depth_of(name: str) -> int:
    """Return the number of blocks in the net of a layout: two, but one for each chunk of an interleaved pipeline."""
    return 4 if "interleaved" in name else 2


def config_of(mesh: dict[str, Any], family: str = "gpt2", layers: int = 2, **settings: Any) -> RunConfig:
    """A small net with dropout, and a batch of several micro-batches."""
    own: dict[str, Any] = LLAMA if family == "llama" else {}
    shape = ShapeConfig(layers=layers, heads=4, width=32, positions=LENGTH, dropout=0.1, **own)
    train = {
        "batch": ROWS,
        "length": LENGTH,
        "learning_rate": 1e-3,
        "label_smoothing": 0.05,
        "epsilon": 1e-6,  # with 1e-8, a gradient that is 0 but for rounding moves its weight by the whole rate
        **settings,
    }
    replicas = int(mesh.get("replicate", 1) * mesh.get("shard", 1))
    micro_batches = 4 if "pipeline" in mesh else 2
    engine = TorchEngine(device="cpu", micro_batch=max(1, ROWS // replicas // micro_batches), mesh=MeshConfig(**mesh))
    model = ModelConfig(family=family, size="tiny" if family == "bert" else "nano", shape=shape)
    return RunConfig(model=model, train=TrainConfig(**train), engine=engine)


def batch_of(step: int, family: str) -> Batch:
    """Samples with different numbers of loss tokens, one with none; on odd steps each has two isolated documents."""
    if family == "bert":
        return masked_batch(step, pairs=step != 2)
    dice = np.random.default_rng(step)
    ids = (dice.integers(0, 12, (ROWS, LENGTH + 1)) ** 2).astype(np.int32) % VOCAB
    labels = ids[:, 1:].copy()
    for row in range(ROWS):
        labels[row, row * LENGTH // ROWS :] = IGNORED
    documents = (
        np.repeat([1, 2], [LENGTH // 3, LENGTH - LENGTH // 3])[None].repeat(ROWS, 0).astype(np.int32)
        if step % 2
        else None
    )
    return Batch(
        inputs=ids[:, :-1], labels=labels, samples=np.arange(step * ROWS, (step + 1) * ROWS), documents=documents
    )


def shape_of(config: RunConfig) -> Any:
    """Return the shape of the config's net."""
    return open_family(config.model.family).shape_of(config.model, vocab=VOCAB, eos_id=0)


def started(config: RunConfig, ranks: Any = None) -> Engine:
    """Open the engine with initial weights."""
    shape = shape_of(config)
    engine = open_engine(config.engine, config.train, shape, config.model.lora, ranks)
    engine.load(initial_weights(shape, 5), [], 0, "the first weights")
    return engine


def stepped(engine: Engine, steps: range, family: str) -> list[tuple[float, float]]:
    """Train on this rank's part of each batch; return loss and gradient norm of each step."""
    found = []
    for step in steps:
        full = batch_of(step, family)
        result = engine.train_step(rows_of(full, engine.samples_of(ROWS)), step, 1e-3)
        assert result.loss_tokens == int((full.labels != IGNORED).sum())
        found.append((result.loss + sum(result.terms.values()), result.norm))
    return found


def state_of(engine: Engine) -> dict[str, Any]:
    """Return the full weights and moments, as in a checkpoint."""
    return dict(engine.weights()) | dict(engine.optimizer_state())


def resumed(config: RunConfig, state: dict[str, Any], ranks: Any = None) -> Engine:
    """Open an engine that resumes from the `state_of` another after SAVED steps."""
    engine = open_engine(config.engine, config.train, shape_of(config), config.model.lora, ranks)
    weights = [(name, values) for name, values in state.items() if "/" not in name]
    engine.load(weights, [(name, values) for name, values in state.items() if "/" in name], SAVED, "saved")
    return engine


def measured(config: RunConfig, ranks: Any = None) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the results of a run, its gradients after the first step, and its state after SAVED steps."""
    engine, family = started(config, ranks), config.model.family
    sums = [engine.eval_step(rows_of(batch_of(0, family), slice(rows))) for rows in (ROWS, 5, 1)]
    sums += [other for one in sums for other in one.others.values()]
    numbers = {
        "sums": [[one.loss, one.loss_tokens, one.correct] for one in sums],
        "first": stepped(engine, range(1), family),
    }
    gradients = {name: values / 0.1 for name, values in engine.optimizer_state() if name.startswith("m/")}
    numbers["losses"] = stepped(engine, range(1, SAVED), family)
    state = state_of(engine)
    numbers["losses"] += stepped(engine, range(SAVED, STEPS), family)
    numbers["muon"] = muons(config, ranks)
    numbers["lora"] = adapters(config, ranks)
    numbers["parameters"] = sum(parameter.numel() for parameter in _held(engine))
    return numbers, gradients, state


def muons(config: RunConfig, ranks: Any) -> list[tuple[float, float]]:
    """Train with Muon, and repeat the last steps with an engine that resumes before them."""
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"optimizer": "muon", "muon": MuonConfig(momentum=0.8)})}
    )
    engine = started(config, ranks)
    numbers = stepped(engine, range(SAVED), config.model.family)
    state = state_of(engine)
    numbers += stepped(engine, range(SAVED, SAVED + 2), config.model.family)
    return numbers + stepped(resumed(config, state, ranks), range(SAVED, SAVED + 2), config.model.family)


def adapters(config: RunConfig, ranks: Any) -> list[tuple[float, float]]:
    """Train adapters with dropout, and repeat the last steps with an engine that resumes before them."""
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": LORA})})
    shape = shape_of(config)
    first = [*initial_weights(shape, 5), *initial_adapters(shape, LORA, 5)]
    engine = open_engine(config.engine, config.train, shape, config.model.lora, ranks)
    engine.load(first, [], 0, "the first weights")
    numbers = stepped(engine, range(SAVED), config.model.family)
    state = dict(first) | state_of(engine)
    numbers += stepped(engine, range(SAVED, SAVED + 2), config.model.family)
    return numbers + stepped(resumed(config, state, ranks), range(SAVED, SAVED + 2), config.model.family)


def _held(engine: Any) -> list[Any]:
    """Return the weights that this rank holds."""
    return list(engine.optimizer.local_parts.values())


def main(folder: Path, names: list[str]) -> int:
    """Run these layouts; each resumes from its own state, and from that of another layout in the folder."""
    others = sorted(path.name.removesuffix(".state.npz") for path in folder.glob("*.state.npz"))
    with closing(open_ranks(config_of({}).engine)) as ranks:
        for number, name in enumerate(names):
            family, depth = family_of(name), depth_of(name)
            own = [other for other in others if (family_of(other), depth_of(other)) == (family, depth)]
            config, before = config_of(LAYOUTS[name], family, depth, clip=0.0), own[number % len(own)]
            numbers, gradients, state = measured(config, ranks)
            numbers["own"] = stepped(resumed(config, state, ranks), range(SAVED, SAVED + MORE), config.model.family)
            numbers["from"] = before
            other = resumed(config, dict(np.load(folder / f"{before}.state.npz")), ranks)
            numbers["after"] = stepped(other, range(SAVED, SAVED + MORE), config.model.family)
            if ranks.first:
                np.savez(folder / f"{name}.gradients.npz", **gradients)
                np.savez(folder / f"{name}.state.npz", **state)
                (folder / f"{name}.json").write_text(json.dumps(numbers))
    return 0


if __name__ == "__main__":
    run_and_exit(lambda: main(Path(sys.argv[1]), sys.argv[2:]))
