"""Mesh: how many ranks each kind of parallelism has, checked against the batch and the net before a run starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from textmill.config import JaxEngine, JaxMesh, TorchEngine, TrainConfig
from textmill.config.engines import MeshConfig
from textmill.config.own_files import is_own_file
from textmill.errors import TextmillError
from textmill.models import Shape, Weight
from textmill.models.family_files import find_family_file


@dataclass(frozen=True)
class LocalSteps:
    """Local SGD: how many steps replicas train alone, and the Nesterov step that follows."""

    every: int
    rate: float
    momentum: float


@dataclass(frozen=True)
class Mesh:
    """The sizes of the axes. Consecutive ranks form a tensor-parallel group, then come shards, replicas, stages."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence: bool = False
    """Sequence parallelism: tensor-parallel ranks divide the tokens of the residual stream."""
    keep_gathered: bool = False
    """Whether FSDP keeps gathered weights from forward to backward."""
    pipeline: int = 1
    """Stages of the pipeline."""
    schedule: str = "1f1b"
    """The order of the pipeline's passes."""
    local: LocalSteps | None = None
    """Local SGD of the replicas; None: they sum their gradients in each step."""

    @property
    def data_ranks(self) -> int:
        """Ranks, or tensor-parallel groups, that compute different samples."""
        return self.replicate * self.shard

    @property
    def chunks(self) -> int:
        """Groups of consecutive blocks that a stage of the pipeline has."""
        return 2 if self.schedule == "interleaved" else 1

    @property
    def ranks_per_sample(self) -> int:
        """Ranks that have the same samples."""
        return self.tensor * self.pipeline

    @property
    def world(self) -> int:
        """All ranks."""
        return self.data_ranks * self.ranks_per_sample


def mesh_of(engine: TorchEngine, train: TrainConfig, shape: Shape, world: int) -> Mesh:
    """The mesh of `engine.mesh` for `world` ranks, checked against batch and net."""
    mesh = _new_mesh(engine.mesh, world)
    if engine.sync_every is not None:
        check_local_sgd(engine, train, mesh)
        mesh = replace(mesh, local=LocalSteps(engine.sync_every, engine.outer_learning_rate, engine.outer_momentum))
    check_batch(train, mesh.data_ranks, engine.micro_batch)
    if mesh.pipeline > 1:
        check_pipeline(engine, train, shape, mesh)
    if mesh.tensor > 1 and engine.precision == "fp8":
        raise TextmillError(
            "engine.precision: fp8 does not work with tensor parallelism; "
            "set engine.precision=auto, or engine.mesh.tensor=1"
        )
    check_divides_net(shape, mesh.tensor)
    length = train.length or shape.positions
    if mesh.sequence and length % mesh.tensor:
        raise TextmillError(
            f"engine.mesh.sequence_parallel: {mesh.tensor} tensor-parallel ranks cannot divide {length} tokens evenly; "
            f"set train.length={nearest(length, mesh.tensor)}, or engine.mesh.sequence_parallel=false"
        )
    return mesh


def mesh_of_devices(engine: JaxEngine, train: TrainConfig, shape: Shape, devices: int) -> Mesh:
    """The mesh of `engine.mesh` for JAX's devices, checked against batch and net."""
    mesh = _new_mesh(engine.mesh, devices, "devices")
    check_batch(train, mesh.data_ranks, engine.micro_batch, "device", "devices")
    check_divides_net(shape, mesh.tensor)
    if shape.padded_vocab % mesh.tensor:
        raise TextmillError(
            f"engine.mesh.tensor: {mesh.tensor} does not divide the vocabulary's {shape.padded_vocab:,} rows; "
            "set a power of two"
        )
    return mesh


def _new_mesh(config: JaxMesh, world: int, unit: str = "processes") -> Mesh:
    mesh = Mesh(shard=config.shard, tensor=config.tensor)
    if isinstance(config, MeshConfig):
        mesh = replace(
            mesh,
            sequence=config.sequence_parallel and config.tensor > 1,
            keep_gathered=config.keep_gathered,
            pipeline=config.pipeline,
            schedule=config.schedule,
        )
    replica = mesh.world
    mesh = replace(mesh, replicate=config.replicate or max(1, world // replica))
    if mesh.world != world:
        axes = f"replicate={mesh.replicate} x shard={mesh.shard} x tensor={mesh.tensor}"
        axes += f" x pipeline={mesh.pipeline}" if mesh.pipeline > 1 else ""
        near = f"{world // replica * replica} or {(world // replica + 1) * replica}" if world > replica else replica
        start = f"start {mesh.world if config.replicate else near}, or " if unit == "processes" else ""
        raise TextmillError(f"engine.mesh: {axes} needs {mesh.world} {unit}, found {world}; {start}set other axes")
    return mesh


def check_local_sgd(engine: TorchEngine, train: TrainConfig, mesh: Mesh) -> None:
    """Refuse what local SGD does not work with."""
    wrong = {
        f"engine.mesh.shard={mesh.shard}": mesh.shard > 1,
        f"engine.mesh.tensor={mesh.tensor}": mesh.tensor > 1,
        f"engine.mesh.pipeline={mesh.pipeline}": mesh.pipeline > 1,
        "engine.precision=fp16": engine.precision == "fp16",
        "train.ema_window": train.ema_window is not None,
        "an optimizer in a file of your own": is_own_file(train.optimizer),
    }
    for setting, found in wrong.items():
        if found:
            raise TextmillError(f"engine.sync_every: does not work with {setting}; remove one of the two")
    if mesh.replicate == 1:
        raise TextmillError("engine.sync_every: needs at least 2 replicas, found 1; start more processes, or remove it")


def stage_blocks(mesh: Mesh, layers: int, stage: int) -> list[range]:
    """The blocks of each chunk of a stage: of 8 blocks, the first of two stages has 0 to 3, or interleaved 0, 1, 4, 5.

    The first chunks have one more if they cannot all have as many."""
    size, more = divmod(layers, mesh.pipeline * mesh.chunks)
    chunks = range(stage, mesh.pipeline * mesh.chunks, mesh.pipeline)
    starts = [chunk * size + min(chunk, more) for chunk in chunks]
    return [range(start, start + size + (chunk < more)) for chunk, start in zip(chunks, starts, strict=True)]


def stages_of(mesh: Mesh, layers: int, weight: Weight) -> list[int]:
    """The stages of the pipeline that have a weight, its owner first; the last one has a tied head too."""
    last = mesh.pipeline - 1
    if weight.depth == 0:
        return [last]
    layer = layers - weight.depth
    if layer < 0:
        is_head = weight.by_token and len(weight.shape) == 2 and not weight.looked_up
        return [0, last] if is_head and last else [0]
    size, more = divmod(layers, mesh.pipeline * mesh.chunks)
    chunk = layer // (size + 1) if layer < more * (size + 1) else (layer - more) // size
    return [chunk % mesh.pipeline]


def check_pipeline(engine: TorchEngine, train: TrainConfig, shape: Shape, mesh: Mesh) -> None:
    """Refuse what pipeline parallelism does not work with, or was not tested with."""
    wrong = {
        f"model.family={shape.family}": find_family_file(shape.family) is not None,
        "a model without a head for tokens": not getattr(shape, "masked_head", True),
        f"train.optimizer={train.optimizer}": is_own_file(train.optimizer),
        f"train.loss={train.loss}": is_own_file(train.loss),
        "train.batch_rampup": bool(train.batch_rampup),
        "train.distil": bool(train.distil.teachers),
        "train.ema_window": train.ema_window is not None,
        "train.freeze": bool(train.freeze),
        f"engine.precision={engine.precision}": engine.precision in ("fp8", "fp16"),
        "engine.compile=true": engine.compile is True,
    }
    for setting, found in wrong.items():
        if found:
            raise TextmillError(f"engine.mesh.pipeline: does not work with {setting}; remove one of the two")
    if mesh.pipeline * mesh.chunks > shape.layers:
        raise TextmillError(
            f"engine.mesh.pipeline: {mesh.pipeline} stages{' of two chunks' * (mesh.chunks - 1)} cannot share "
            f"{shape.layers} blocks; set engine.mesh.pipeline={shape.layers // mesh.chunks} or less"
        )
    passes = train.batch // mesh.data_ranks
    passes //= engine.micro_batch if isinstance(engine.micro_batch, int) else 1
    if passes < mesh.pipeline or (mesh.chunks > 1 and passes % mesh.pipeline):
        wanted = "a multiple of as many" if mesh.chunks > 1 else "as many"
        raise TextmillError(
            f"engine.mesh.pipeline: {mesh.pipeline} stages need {wanted} micro-batches in a step, found {passes}; "
            f"set a smaller engine.micro_batch, or train.batch={mesh.pipeline * mesh.data_ranks} or more"
        )


def check_batch(
    train: TrainConfig, ranks: int, micro_batch: int | str, unit: str = "process", units: str = "processes"
) -> None:
    """Refuse a batch size, or one of `train.batch_rampup`, that ranks or micro-batches cannot divide evenly."""
    for key, size in (("train.batch", train.batch), *(("train.batch_rampup", size) for size in train.batch_rampup[:2])):
        if size % ranks:
            raise TextmillError(
                f"{key}: {size} samples cannot be divided evenly by {ranks} {units}; {nearest(size, ranks)} can"
            )
        rank_batch = size // ranks
        if isinstance(micro_batch, int) and rank_batch % micro_batch:
            near = max(divisor for divisor in range(1, micro_batch + 1) if rank_batch % divisor == 0)
            raise TextmillError(
                f"engine.micro_batch: {micro_batch} does not divide the {rank_batch} samples of a {unit}; {near} does"
            )


def check_divides_net(shape: Shape, tensor: int) -> None:
    """Refuse a number of tensor-parallel ranks that does not divide the heads and widths of the net."""
    sizes = shape.tensor_parallel_sizes()
    for name, size in sizes.items():
        if size % tensor:
            fitting = [str(ranks) for ranks in range(2, size + 1) if not any(other % ranks for other in sizes.values())]
            key = "heads" if name == "kv_heads" and shape.heads == size else name  # one follows the other
            change = f"set engine.mesh.tensor=1, or for a new model model.shape.{key}={nearest(size, tensor)}"
            raise TextmillError(
                f"engine.mesh.tensor: {tensor} does not divide model.shape.{name}={size}; "
                + (f"{', '.join(fitting[:6])} would" if fitting else change)
            )


def nearest(number: int, divisor: int) -> str:
    """The nearest multiples of the divisor, as text."""
    below = number // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)
