"""Mesh: how many ranks each kind of parallelism has, checked against the batch and the net before a run starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from textmill.config import TorchEngine, TrainConfig
from textmill.config.engines import MeshConfig
from textmill.config.own_files import is_own_file
from textmill.errors import TextmillError
from textmill.models import Shape, own_options


@dataclass(frozen=True)
class LocalSteps:
    """Local SGD: how many steps replicas train alone, and the Nesterov step that follows."""

    every: int
    rate: float
    momentum: float


@dataclass(frozen=True)
class Mesh:
    """The sizes of the axes. Consecutive ranks form a tensor-parallel group, then come shards, then replicas."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence: bool = False
    """Sequence parallelism: tensor-parallel ranks divide the tokens of the residual stream."""
    keep_gathered: bool = False
    """Whether FSDP keeps gathered weights from forward to backward."""
    local: LocalSteps | None = None
    """Local SGD of the replicas; None: they sum their gradients in each step."""

    @property
    def data_ranks(self) -> int:
        """Ranks, or tensor-parallel groups, that compute different samples."""
        return self.replicate * self.shard


def mesh_of(engine: TorchEngine, train: TrainConfig, shape: Shape, world: int) -> Mesh:
    """The mesh of `engine.mesh` for `world` ranks, checked against batch and net."""
    mesh = _build_mesh(engine.mesh, world)
    if engine.sync_every is not None:
        check_local_sgd(engine, train, mesh)
        mesh = replace(mesh, local=LocalSteps(engine.sync_every, engine.outer_learning_rate, engine.outer_momentum))
    check_batch(train, mesh.data_ranks, engine.micro_batch)
    if mesh.tensor > 1 and engine.precision == "fp8":
        raise TextmillError(
            "engine.precision: fp8 does not work with tensor parallelism; "
            "set engine.precision=auto, or engine.mesh.tensor=1"
        )
    if mesh.tensor > 1:
        check_divides_net(shape, mesh.tensor)
    length = train.length or shape.positions
    if mesh.sequence and length % mesh.tensor:
        raise TextmillError(
            f"engine.mesh.sequence_parallel: {mesh.tensor} tensor-parallel ranks cannot divide {length} tokens evenly; "
            f"set train.length={nearest(length, mesh.tensor)}, or engine.mesh.sequence_parallel=false"
        )
    return mesh


def _build_mesh(config: MeshConfig, world: int) -> Mesh:
    replica = config.shard * config.tensor
    replicate = config.replicate or max(1, world // replica)
    if replicate * replica != world:
        axes = f"replicate={replicate} x shard={config.shard} x tensor={config.tensor}"
        near = f"{world // replica * replica} or {(world // replica + 1) * replica}" if world > replica else replica
        fitting = replicate * replica if config.replicate else near
        raise TextmillError(
            f"engine.mesh: {axes} needs {replicate * replica} processes, found {world}; "
            f"start {fitting}, or set other axes"
        )
    return Mesh(
        replicate, config.shard, config.tensor, config.sequence_parallel and config.tensor > 1, config.keep_gathered
    )


def check_local_sgd(engine: TorchEngine, train: TrainConfig, mesh: Mesh) -> None:
    """Refuse what local SGD does not work with."""
    wrong = {
        f"engine.mesh.shard={mesh.shard}": mesh.shard > 1,
        f"engine.mesh.tensor={mesh.tensor}": mesh.tensor > 1,
        "engine.precision=fp16": engine.precision == "fp16",
        "train.ema_window": train.ema_window is not None,
        "an optimizer in a file of your own": is_own_file(train.optimizer),
    }
    for setting, found in wrong.items():
        if found:
            raise TextmillError(f"engine.sync_every: does not work with {setting}; remove one of the two")
    if mesh.replicate == 1:
        raise TextmillError("engine.sync_every: needs at least 2 replicas, found 1; start more processes, or remove it")


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
    if own := own_options(shape):
        raise TextmillError(
            f"engine.mesh.tensor: tensor parallelism has no {', '.join(own)} of model.shape; set engine.mesh.tensor=1"
        )
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
