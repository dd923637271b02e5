"""Small copies of a run's config: same family, mesh, gradient accumulation, precision and loss, on a tiny net."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from textmill.checkpoints.folders import open_model
from textmill.config import DistilConfig, EngineConfig, LoraConfig, ModelConfig, RunConfig, ShapeConfig
from textmill.config.deepspeed_json import read_user_config
from textmill.config.engines import DeepSpeedEngine, TorchEngine
from textmill.config.own_files import is_own_file
from textmill.engines.deepspeed_config import fill_unset
from textmill.engines.meshes import mesh_of
from textmill.errors import TextmillError
from textmill.models import Shape, open_family, read_shape
from textmill.models.lora import weights_with_adapters
from textmill.models.parameter_groups import matches
from textmill.storage.files import read_json
from textmill.tokens.batches.batch import IGNORED, Batch

STEPS = 8
"""Optimizer steps that are compared."""
LENGTH = 24
VOCAB = 150
LAYERS = 2
MICRO_BATCH = 2
MAX_PROCESSES = 4
"""Each axis of a mesh with more processes is reduced to two."""
LEARNING_RATE = 1e-2
LOW_LEARNING_RATE = 1e-3
"""The low one is for half precision and adapters, where a high one would amplify rounding differences."""
AXES = ("replicate", "shard", "tensor", "pipeline")
LOSS_BOUNDS = {"fp32": 1e-6, "bf16": 1e-3, "fp16": 1e-3}
"""The largest relative difference of losses, by the precision of the matmuls."""
MUON_LOSS_BOUND = 5e-3
"""The same with Muon, in any precision."""
GRADIENT_BOUNDS = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
"""The largest relative difference of gradients."""
HALF_PRECISIONS = {"auto": "bf16", "bf16": "bf16", "fp8": "bf16", "fp16": "fp16"}
"""The half precision of the matmuls, by `engine.precision`."""
REPLACED_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "fp16",
    "bf16",
    "optimizer",
    "scheduler",
)
"""Keys of a user's DeepSpeed JSON that a small copy replaces."""


@dataclass(frozen=True)
class PrecisionTrial:
    """One precision that is tried, and the bounds of its comparisons."""

    precision: str
    loss_bound: float
    gradient_bound: float
    replicated: frozenset[str] = frozenset()
    """Weights that every tensor-parallel rank has in full."""
    compiled: bool = False
    """Whether the net on the mesh is compiled."""

    @property
    def name(self) -> str:
        """The precision, and compiled if it is."""
        return f"{self.precision} compiled" if self.compiled else self.precision


@dataclass(frozen=True)
class VerificationPlan:
    """The configs to train: each trial on one process (`single`) and on the mesh (`parallel`)."""

    single: list[RunConfig]
    parallel: list[RunConfig]
    trials: list[PrecisionTrial]
    processes: int
    sizes: dict[str, int]

    @property
    def mesh(self) -> str:
        """The mesh as text, after the ZeRO stage if there is one."""
        zero = getattr(self.parallel[0].engine, "zero", None)
        return ("" if zero is None else f"zero {zero}, ") + " x ".join(
            f"{axis} {size}" for axis, size in self.sizes.items() if size > 1
        )

    @property
    def reference(self) -> str:
        """What the mesh is compared with."""
        return "one device" if self.parallel[0].engine.one_process else "one process"

    def describe(self) -> str:
        """The first line of the report."""
        config = self.parallel[0]
        precisions = " and ".join(trial.name for trial in self.trials)
        batch = f"batch {config.train.batch}, micro-batch {config.engine.micro_batch}"
        where = "simulated devices of one process" if config.engine.one_process else "processes of this machine"
        return f"{self.mesh} on {self.processes} {where}, {batch}, {STEPS} steps in {precisions}"


def build_plan(config: RunConfig) -> VerificationPlan:
    """The small copies of a config, for one process and for the mesh, in each precision."""
    engine = _inline_user_config(config.engine)
    config = config.model_copy(update={"engine": engine})
    full = _full_shape(config.model)
    if isinstance(engine, TorchEngine):
        if engine.sync_every is not None:
            raise TextmillError(
                "engine.sync_every: local SGD does not give the numbers of one process; "
                "verify the other settings with engine.sync_every=null"
            )
        mesh = engine.mesh
        world = (mesh.replicate or 1) * mesh.shard * mesh.tensor * mesh.pipeline
        mesh_of(engine, config.train, full, world)  # raises if it does not fit the run
    sizes = _mesh_sizes(engine)
    kinds = [(precision, False) for precision in _precisions(engine)]
    kinds += [("fp32", True)] if getattr(engine, "compile", None) is True else []
    data_ranks = sizes["replicate"] * sizes["shard"]
    steps = _accumulation_steps(engine, config.train.batch // data_ranks)
    stages = sizes["pipeline"]
    rank_batch = math.ceil(steps / stages) * stages * MICRO_BATCH
    single, parallel = [], []
    for precision, compiled in kinds:
        small = _shrink(config, full, precision, data_ranks * rank_batch, sizes["tensor"])
        one = _on_mesh(small.engine, dict.fromkeys(AXES, 1), rank_batch)
        single.append(small.model_copy(update={"engine": one}))
        many = _on_mesh(small.engine, sizes, MICRO_BATCH)
        many = many.model_copy(update={"compile": True}) if compiled else many
        parallel.append(small.model_copy(update={"engine": many}))
    replicated = _replicated(single[0].model)
    least_bound = MUON_LOSS_BOUND if config.train.optimizer != "adamw" else 0.0
    trials = [
        PrecisionTrial(name, max(LOSS_BOUNDS[name], least_bound), GRADIENT_BOUNDS[name], replicated, compiled)
        for name, compiled in kinds
    ]
    return VerificationPlan(single, parallel, trials, math.prod(sizes.values()), sizes)


def trial_shape(model: ModelConfig) -> Shape:
    """The shape of a small copy's net."""
    return open_family(model.family).shape_of(model, vocab=VOCAB, eos_id=0)


def _replicated(model: ModelConfig) -> frozenset[str]:
    """The names of the weights that tensor parallelism does not divide."""
    weights = weights_with_adapters(trial_shape(model), model.lora)
    return frozenset(weight.name for weight in weights if weight.split is None)


def _inline_user_config(engine: EngineConfig) -> EngineConfig:
    """Move a user's DeepSpeed JSON into the section, without its batch and precision, which a small copy changes."""
    if not isinstance(engine, DeepSpeedEngine) or engine.deepspeed_config is None:
        return engine
    user = read_user_config(engine.deepspeed_config)
    rest = {name: value for name, value in user.items() if name not in REPLACED_KEYS}
    update = {"deepspeed_config": None, "deepspeed_overrides": rest | engine.deepspeed_overrides}
    return fill_unset(engine, user).model_copy(update=update)


def _mesh_sizes(engine: EngineConfig) -> dict[str, int]:
    """The axes of the mesh: two replicas if none is set; a large mesh is reduced."""
    mesh = getattr(engine, "mesh", None)
    sizes = {axis: getattr(mesh, axis, None) or 1 for axis in AXES}
    if math.prod(sizes.values()) == 1:
        sizes["replicate"] = 2
    sizes["pipeline"] = min(sizes["pipeline"], LAYERS)
    return sizes if math.prod(sizes.values()) <= MAX_PROCESSES else {axis: min(size, 2) for axis, size in sizes.items()}


def _accumulation_steps(engine: EngineConfig, rank_batch: int) -> int:
    """Micro-batches of a step on each rank: as in the run, at most three; two if `engine.micro_batch` is auto."""
    if engine.micro_batch == "auto":
        return 2
    return max(1, min(3, rank_batch // engine.micro_batch))


def _precisions(engine: EngineConfig) -> list[str]:
    """fp32, whose bounds are tight, and the half precision that the run may use."""
    half = HALF_PRECISIONS.get(getattr(engine, "precision", "fp32"))
    return ["fp32", half] if half else ["fp32"]


def _shrink(config: RunConfig, full: Shape, precision: str, batch: int, tensor: int) -> RunConfig:
    """The config with a small net and a small batch, on a CPU."""
    # Given weights may be of another family than the config names.
    name = config.model.family if is_own_file(config.model.family) else full.family
    family = open_family(name)
    small_shape = family.small_shape(full, tensor)
    if getattr(getattr(config.engine, "mesh", None), "schedule", None) == "interleaved":
        small_shape["layers"] = 2 * LAYERS
    shape = ShapeConfig(**small_shape, positions=LENGTH)
    model = config.model.model_copy(update={"family": name, "shape": shape, "init_from": None, "init_layers": []})
    small = family.shape_of(model, vocab=VOCAB, eos_id=0).weights()
    frozen = [one for one in config.train.freeze if any(matches(weight.parameter, one) for weight in small)]
    train = {
        "batch": batch,
        "length": LENGTH,
        "steps": STEPS,
        "epochs": None,
        "samples": None,
        "tokens": None,
        "batch_rampup": [],
        "freeze": frozen,
        "distil": DistilConfig(),  # the mesh does not change what teachers predict
    }
    engine = {
        "device": "cpu",
        "compile": False,
        "precision": precision,
        "activation_checkpointing": min(config.engine.activation_checkpointing, LAYERS),
    }
    known = {key: value for key, value in engine.items() if key in type(config.engine).model_fields}
    return config.model_copy(
        update={
            "model": model,
            "train": config.train.model_copy(update=train),
            "engine": config.engine.model_copy(update=known),
        }
    )


def _on_mesh(engine: EngineConfig, sizes: dict[str, int], micro_batch: int) -> EngineConfig:
    """The engine on a mesh of these sizes."""
    update: dict[str, Any] = {"micro_batch": micro_batch}
    if (mesh := getattr(engine, "mesh", None)) is not None:
        update["mesh"] = mesh.model_copy(
            update={axis: size for axis, size in sizes.items() if axis in type(mesh).model_fields}
        )
    return engine.model_copy(update=update)


def _full_shape(model: ModelConfig) -> Shape:
    """The shape of the run's own net, except for its vocabulary."""
    family = open_family(model.family)
    if model.init_from:
        return read_shape(open_model(model.init_from).folder)
    return family.shape_of(model, vocab=VOCAB, eos_id=0)


def read_config(path: Path) -> RunConfig:
    """Read a small copy; its adapters are on random weights, which the config's validation rejects."""
    tree = read_json(path)
    lora = tree["model"].pop("lora")
    config = RunConfig.model_validate(tree)
    model = config.model.model_copy(update={"lora": lora and LoraConfig(**lora)})
    return config.model_copy(update={"model": model})


def learning_rate(lora: LoraConfig | None, precision: str) -> float:
    """The learning rate of a trial's steps."""
    return LOW_LEARNING_RATE if lora or precision != "fp32" else LEARNING_RATE


def build_batches(rows: int, *, isolate_documents: bool) -> Iterator[Batch]:
    """Random global batches whose samples have different numbers of loss tokens, one of them none.

    They have document numbers if the run isolates documents.
    """
    random = np.random.default_rng(7)
    for step in range(STEPS):
        ids = (random.integers(0, 12, (rows, LENGTH + 1)) ** 2).astype(np.int32) % VOCAB
        labels = ids[:, 1:].copy()
        for row in range(rows):
            labels[row, LENGTH - row * LENGTH // rows :] = IGNORED
        labels[step % rows] = IGNORED
        documents = None
        if isolate_documents:
            documents = 1 + (np.arange(LENGTH)[None] >= random.integers(4, LENGTH - 4, (rows, 1))).astype(np.int32)
        yield Batch(ids[:, :-1], labels, np.arange(step * rows, (step + 1) * rows), documents)
