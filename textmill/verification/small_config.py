"""A small copy of a run: its family, mesh, accumulation, kind of precision, loss and checkpointing, on a net that takes no time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from textmill.checkpoints.folders import open_model
from textmill.config import LoraConfig, RunConfig, ShapeConfig
from textmill.config.engines import DeepSpeedEngine, TorchEngine
from textmill.engines.deepspeed_config import read_file, settled
from textmill.engines.meshes import mesh_of
from textmill.models import Shape, open_family, shape_in
from textmill.models.lora import weights_with
from textmill.models.parameter_groups import matches
from textmill.storage.files import read_json, write_text
from textmill.tokens.batches.batch import IGNORED, Batch

STEPS = 8
"""Updates that are compared."""
LENGTH, VOCAB, LAYERS, MICRO = 24, 150, 2, 2
MOST = 4
"""Processes up to which a mesh is tried as it is; of a larger one each axis is cut to two."""
RATE, GENTLE_RATE = 1e-2, 1e-3
"""The learning rate of every step; a gentle one where rounding would grow with it: in half precision, and for adapters, which are soon more
than a net that has learnt nothing."""
AXES = ("replicate", "shard", "tensor")
BOUNDS = {"fp32": 1e-6, "bf16": 1e-3, "fp16": 1e-3}
"""How far losses may lie apart, relative, by the arithmetic of the products."""
MUON = 5e-3
OF_THE_RUN = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "fp16", "bf16", "optimizer",
    "scheduler",
)  # fmt: skip
"""Parts of a DeepSpeed file that a small copy says anew."""


@dataclass(frozen=True)
class Trial:
    """One precision's run and how equal is equal in it."""

    precision: str
    loss_bound: float
    gradient_bound: float
    replicated: frozenset[str] = frozenset()
    """Weights that every tensor-parallel rank has all of."""


@dataclass(frozen=True)
class Plan:
    """What is run twice: on one process, and on all of the mesh."""

    alone: list[RunConfig]
    many: list[RunConfig]
    trials: list[Trial]
    processes: int
    sizes: dict[str, int]

    @property
    def mesh(self) -> str:
        """The mesh in words; before it the stage of ZeRO where there is one."""
        zero = getattr(self.many[0].engine, "zero", None)
        return ("" if zero is None else f"zero {zero}, ") + " x ".join(
            f"{axis} {size}" for axis, size in self.sizes.items() if size > 1
        )

    @property
    def one(self) -> str:
        """What the mesh is held against."""
        return "one device" if self.many[0].engine.one_process else "one process"

    def spoken(self) -> str:
        """What is about to be done."""
        config = self.many[0]
        kinds = " and ".join(trial.precision for trial in self.trials)
        batch = f"{config.train.batch} samples a step by {config.engine.micro_batch}"
        where = "devices that one process pretends" if config.engine.one_process else "processes of this machine"
        return f"{self.mesh} on {self.processes} {where}, {batch}, {STEPS} steps in {kinds}"


def plan_of(config: RunConfig) -> Plan:
    """The small copies of a config: a list for one process, a list for the mesh, a pair a precision."""
    config = _without_file(config)
    full = _full_shape(config)
    if isinstance(
        config.engine, TorchEngine
    ):  # what does not fit the real net and batch is refused as a run would refuse it
        said = config.engine.mesh
        mesh_of(config, full, (said.replicate or 1) * said.shard * said.tensor)
    sizes, precisions = mesh_sizes(config), precisions_of(config)
    ways = sizes["replicate"] * sizes["shard"]
    own = turns_of(config, ways) * MICRO
    pairs = []
    for precision in precisions:
        small = _shrunk(config, full, precision, ways * own, sizes["tensor"])
        pairs.append((_on(small, dict.fromkeys(AXES, 1), own), _on(small, sizes, MICRO)))
    muon, replicated = config.train.optimizer == "muon", _replicated(pairs[0][0])
    trials = [
        Trial(one, max(BOUNDS[one], MUON if muon else 0.0), 1e-5 if one == "fp32" else 2e-2, replicated)
        for one in precisions
    ]
    return Plan([alone for alone, _ in pairs], [many for _, many in pairs], trials, math.prod(sizes.values()), sizes)


def _replicated(small: RunConfig) -> frozenset[str]:
    shape = open_family(small.model.family).shape_of(small.model, vocab=VOCAB, end=0)
    return frozenset(weight.name for weight in weights_with(shape, small.model.lora) if weight.split is None)


def _without_file(config: RunConfig) -> RunConfig:
    """DeepSpeed's own file speaks of the run's batch and precision, which a small copy changes: the rest of it becomes settings."""
    engine = config.engine
    if not isinstance(engine, DeepSpeedEngine) or engine.deepspeed_config is None:
        return config
    theirs = read_file(engine.deepspeed_config)
    rest = {name: value for name, value in theirs.items() if name not in OF_THE_RUN}
    update = {"deepspeed_config": None, "deepspeed_overrides": rest | engine.deepspeed_overrides}
    return config.model_copy(update={"engine": settled(engine, theirs).model_copy(update=update)})


def mesh_sizes(config: RunConfig) -> dict[str, int]:
    """The axes of the mesh; two copies where none is said, and a large one cut down."""
    mesh = getattr(config.engine, "mesh", None)
    sizes = {axis: getattr(mesh, axis, None) or 1 for axis in AXES}
    if math.prod(sizes.values()) == 1:
        sizes["replicate"] = 2
    return sizes if math.prod(sizes.values()) <= MOST else {axis: min(size, 2) for axis, size in sizes.items()}


def turns_of(config: RunConfig, ways: int) -> int:
    """Micro-batches of a step on each process: as many as the run will have, up to three; two where it is not known."""
    if config.engine.micro_batch == "auto":
        return 2
    return max(1, min(3, config.train.batch // (ways * config.engine.micro_batch)))


def precisions_of(config: RunConfig) -> list[str]:
    """fp32, in which equal is equal, and the kind that the run will use."""
    kind = getattr(config.engine, "precision", "fp32")
    return ["fp32"] + [one for one in ("bf16", "fp16") if kind == one or (one == "bf16" and kind in ("auto", "fp8"))]


def _shrunk(config: RunConfig, full: Shape, precision: str, batch: int, tensor: int) -> RunConfig:
    """The config with a small net and a small batch, whatever its data."""
    family = open_family(config.model.family)
    shape = ShapeConfig(**family.small_shape(full, tensor), positions=LENGTH)
    model = config.model.model_copy(update={"shape": shape, "init_from": None})
    small = family.weights_of(family.shape_of(model, vocab=VOCAB, end=0))
    frozen = [one for one in config.train.freeze if any(matches(weight.parameter, one) for weight in small)]
    train = {
        "batch": batch,
        "length": LENGTH,
        "steps": STEPS,
        "batch_rampup": [],
        "epochs": None,
        "samples": None,
        "tokens": None,
        "freeze": frozen,
    }
    engine = {
        "device": "cpu",
        "compile": False,
        "precision": precision,
        "recompute": min(config.engine.recompute, LAYERS),
    }
    known = {key: value for key, value in engine.items() if key in type(config.engine).model_fields}
    return config.model_copy(update={
        "model": model,
        "train": config.train.model_copy(update=train), "engine": config.engine.model_copy(update=known),
    })  # fmt: skip


def _on(config: RunConfig, sizes: dict[str, int], micro_batch: int) -> RunConfig:
    """The config on a mesh of these sizes."""
    update: dict[str, Any] = {"micro_batch": micro_batch}
    if (mesh := getattr(config.engine, "mesh", None)) is not None:
        update["mesh"] = mesh.model_copy(
            update={axis: size for axis, size in sizes.items() if axis in type(mesh).model_fields}
        )
    return config.model_copy(update={"engine": config.engine.model_copy(update=update)})


def _full_shape(config: RunConfig) -> Shape:
    """The net that the run will have, but for its vocabulary."""
    family = open_family(config.model.family)
    if config.model.init_from:
        return shape_in(open_model(config.model.init_from).folder)
    return family.shape_of(config.model, vocab=VOCAB, end=0)


def hand_over(config: RunConfig, folder: Path) -> None:
    """Write a small copy for the processes that run it; its adapters apart, since they lie on first weights, which no run's may."""
    model = config.model.model_copy(update={"lora": None})
    write_text(folder / "config.json", config.model_copy(update={"model": model}).model_dump_json())
    write_text(folder / "lora.json", config.model.lora.model_dump_json() if config.model.lora else "null")


def handed_over(folder: Path) -> RunConfig:
    """The way back of `hand_over`."""
    config = RunConfig.model_validate_json((folder / "config.json").read_text(encoding="utf-8"))
    lora = read_json(folder / "lora.json")
    model = config.model.model_copy(update={"lora": lora and LoraConfig(**lora)})
    return config.model_copy(update={"model": model})


def rate_of(config: RunConfig) -> float:
    """The learning rate of a trial's steps."""
    return GENTLE_RATE if config.model.lora or config.engine.precision != "fp32" else RATE


def batches_of(config: RunConfig) -> Iterator[Batch]:
    """Global batches whose samples ask for different numbers of tokens, one of them for none; with documents where they are kept apart."""
    dice, rows = np.random.default_rng(7), config.train.batch
    for step in range(STEPS):
        ids = (dice.integers(0, 12, (rows, LENGTH + 1)) ** 2).astype(np.int32) % VOCAB
        labels = ids[:, 1:].copy()
        for row in range(rows):
            labels[row, LENGTH - row * LENGTH // rows :] = IGNORED
        labels[step % rows] = IGNORED
        documents = None
        if config.train.packed.isolate_documents:
            documents = 1 + (np.arange(LENGTH)[None] >= dice.integers(4, LENGTH - 4, (rows, 1))).astype(np.int32)
        yield Batch(ids[:, :-1], labels, np.arange(step * rows, (step + 1) * rows), documents)
