"""What each of several processes does in the tests of layouts: layout_process.py FOLDER LAYOUT..."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import LoraConfig, ModelConfig, MuonConfig, RunConfig, ShapeConfig, TorchEngine, TrainConfig
from textmill.config.engines import MeshConfig
from textmill.engines import Engine, open_engine, open_ranks
from textmill.models import initial_weights, open_family
from textmill.models.lora import initial_adapters
from textmill.processes.exits import run_and_exit
from textmill.tokens.batches.batch import IGNORED, Batch

VOCAB, LENGTH, ROWS, STEPS, SAVED, MORE = 150, 24, 8, 12, 6, 3
LORA = LoraConfig(rank=4, alpha=6.0, dropout=0.2)
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp-2": {"replicate": 2},
    "shard-2": {"shard": 2},
    "shard-kept-2": {"shard": 2, "keep_gathered": True},
    "tensor-2": {"tensor": 2, "sequence_parallel": False},
    "sequence-2": {"tensor": 2},
    "ddp-4": {"replicate": 4},
    "shard-4": {"shard": 4},
    "ddp-2-shard-2": {"replicate": 2, "shard": 2},
    "shard-2-sequence-2": {"shard": 2, "tensor": 2},
    "ddp-2-tensor-2": {"replicate": 2, "tensor": 2, "sequence_parallel": False},
}


def processes_of(name: str) -> int:
    """How many processes a layout takes."""
    mesh = LAYOUTS[name]
    return int(mesh.get("replicate", 1) * mesh.get("shard", 1) * mesh.get("tensor", 1))


def config_of(mesh: dict[str, Any], **settings: Any) -> RunConfig:
    """A small net with dropout everywhere, its batch in several passes."""
    shape = ShapeConfig(layers=2, heads=4, width=32, positions=LENGTH, dropout=0.1)
    train = {
        "batch": ROWS,
        "length": LENGTH,
        "learning_rate": 1e-3,
        "label_smoothing": 0.05,
        "z_loss": 1e-3,
        **settings,
    }
    ways = int(mesh.get("replicate", 1) * mesh.get("shard", 1))
    engine = TorchEngine(device="cpu", micro_batch=ROWS // ways // 2, mesh=MeshConfig(**mesh))
    return RunConfig(model=ModelConfig(size="nano", shape=shape), train=TrainConfig(**train), engine=engine)


def batch_of(step: int) -> Batch:
    """Samples that ask for different numbers of tokens, one of them for none, each of two documents kept apart on odd steps."""
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


def started(config: RunConfig, ranks: Any = None) -> Engine:
    """The engine with the first weights."""
    family = open_family("gpt2")
    shape = family.shape_of(config.model, vocab=VOCAB, end=0)
    engine = open_engine(config, shape, ranks)
    engine.load(initial_weights(shape, 5), [], 0, "the first weights")
    return engine


def stepped(engine: Engine, steps: range) -> list[tuple[float, float]]:
    """Loss and norm of each step, on this process's part of the batch."""
    found = []
    for step in steps:
        whole = batch_of(step)
        part = engine.samples_of(ROWS)
        documents = None if whole.documents is None else whole.documents[part]
        batch = Batch(whole.inputs[part], whole.labels[part], whole.samples[part], documents)
        result = engine.train_step(batch, step, 1e-3)
        assert result.asked == int((whole.labels != IGNORED).sum())
        found.append((result.loss, result.norm))
    return found


def state_of(engine: Engine) -> dict[str, Any]:
    """Whole weights and moments, as a checkpoint would have them."""
    return dict(engine.weights()) | dict(engine.moments())


def resumed(config: RunConfig, state: dict[str, Any], ranks: Any = None) -> Engine:
    """An engine that goes on from what `state_of` gave after SAVED steps."""
    engine = open_engine(config, open_family("gpt2").shape_of(config.model, vocab=VOCAB, end=0), ranks)
    weights = [(name, values) for name, values in state.items() if "/" not in name]
    engine.load(weights, [(name, values) for name, values in state.items() if "/" in name], SAVED, "saved")
    return engine


def measured(config: RunConfig, ranks: Any = None) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Numbers of a run, its gradients after the first step, and its state after SAVED steps."""
    engine = started(config, ranks)
    sums = [engine.eval_step(cut(batch_of(0), rows)) for rows in (ROWS, 5, 1)]
    numbers = {"sums": [[one.loss, one.asked, one.correct] for one in sums], "first": stepped(engine, range(1))}
    gradients = {name: values / 0.1 for name, values in engine.moments() if name.startswith("m/")}
    numbers["losses"] = stepped(engine, range(1, SAVED))
    state = state_of(engine)
    numbers["losses"] += stepped(engine, range(SAVED, STEPS))
    numbers["muon"] = muons(config, ranks)
    numbers["lora"] = adapters(config, ranks)
    numbers["parameters"] = sum(parameter.numel() for parameter in _held(engine))
    return numbers, gradients, state


def muons(config: RunConfig, ranks: Any) -> list[tuple[float, float]]:
    """Steps of Muon, and the last of them again by an engine that goes on from what was saved before them."""
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"optimizer": "muon", "muon": MuonConfig(momentum=0.8)})}
    )
    engine = started(config, ranks)
    numbers = stepped(engine, range(SAVED))
    state = state_of(engine)
    numbers += stepped(engine, range(SAVED, SAVED + 2))
    return numbers + stepped(resumed(config, state, ranks), range(SAVED, SAVED + 2))


def adapters(config: RunConfig, ranks: Any) -> list[tuple[float, float]]:
    """Steps of adapters with dropout, and the last of them again by an engine that goes on from what was saved before them."""
    config = config.model_copy(update={"model": config.model.model_copy(update={"lora": LORA})})
    shape = open_family("gpt2").shape_of(config.model, vocab=VOCAB, end=0)
    first = [*initial_weights(shape, 5), *initial_adapters(shape, LORA, 5)]
    engine = open_engine(config, shape, ranks)
    engine.load(first, [], 0, "the first weights")
    numbers = stepped(engine, range(SAVED))
    state = dict(first) | state_of(engine)
    numbers += stepped(engine, range(SAVED, SAVED + 2))
    return numbers + stepped(resumed(config, state, ranks), range(SAVED, SAVED + 2))


def _held(engine: Any) -> list[Any]:
    """What this process has in memory of the weights."""
    return list(engine.optimizer.own.values())


def cut(batch: Batch, rows: int) -> Batch:
    """The first rows of a batch."""
    return Batch(batch.inputs[:rows], batch.labels[:rows], batch.samples[:rows])


def main(folder: Path, names: list[str]) -> int:
    """These layouts, each of as many processes as there are; each goes on from its own state, and from one that stands in the folder."""
    strangers = sorted(path.name.removesuffix(".state.npz") for path in folder.glob("*.state.npz"))
    with closing(open_ranks(config_of({}))) as ranks:
        for number, name in enumerate(names):
            config, before = config_of(LAYOUTS[name], clip=0.0), strangers[number % len(strangers)]
            numbers, gradients, state = measured(config, ranks)
            numbers["own"] = stepped(resumed(config, state, ranks), range(SAVED, SAVED + MORE))
            numbers["from"] = before
            stranger = resumed(config, dict(np.load(folder / f"{before}.state.npz")), ranks)
            numbers["after"] = stepped(stranger, range(SAVED, SAVED + MORE))
            if ranks.first:
                np.savez(folder / f"{name}.gradients.npz", **gradients)
                np.savez(folder / f"{name}.state.npz", **state)
                (folder / f"{name}.json").write_text(json.dumps(numbers))
    return 0


if __name__ == "__main__":
    run_and_exit(lambda: main(Path(sys.argv[1]), sys.argv[2:]))
