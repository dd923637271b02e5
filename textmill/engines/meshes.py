"""Mesh: how many processes do what; a mesh that does not fit is refused before anything starts, with those that do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from textmill.config import RunConfig, TorchEngine, TrainConfig
from textmill.config.engines import MeshConfig
from textmill.errors import TextmillError


@dataclass(frozen=True)
class Mesh:
    """The sizes of the axes. Neighbouring ranks are tensor peers, then come shards, then copies."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    sequence: bool = False
    """Whether tensor peers share the stream between layers by tokens."""
    keep: bool = False
    """Whether gathered weights stay from forward to backward."""

    @property
    def ways(self) -> int:
        """Into how many parts a batch is cut."""
        return self.replicate * self.shard


def mesh_of(config: RunConfig, shape: Any, world: int) -> Mesh:
    """The mesh of so many processes, on which batch and net fit."""
    assert isinstance(config.engine, TorchEngine)
    mesh = _mesh(config.engine.mesh, world)
    check_batch(config.train, mesh.ways, config.engine.micro_batch)
    if mesh.tensor > 1:
        _check_net(config, shape, mesh)
    return mesh


def _mesh(config: MeshConfig, world: int) -> Mesh:
    held = config.shard * config.tensor
    replicate = config.replicate or max(1, world // held)
    if replicate * held != world:
        asked = f"replicate={replicate} x shard={config.shard} x tensor={config.tensor}"
        near = f"{world // held * held} or {(world // held + 1) * held}" if world > held else str(held)
        fitting = replicate * held if config.replicate else near
        raise TextmillError(
            f"engine.mesh: {asked} is for {replicate * held} processes, found {world}; start {fitting}, or set other axes"
        )
    return Mesh(
        replicate, config.shard, config.tensor, config.sequence_parallel and config.tensor > 1, config.keep_gathered
    )


def check_batch(
    train: TrainConfig, ways: int, micro_batch: int | str, unit: str = "process", units: str = "processes"
) -> None:
    """Refuse a batch, or one that it grows through, which so many ways or the micro-batches do not share evenly."""
    for key, size in (("train.batch", train.batch), *(("train.batch_rampup", size) for size in train.batch_rampup[:2])):
        if size % ways:
            raise TextmillError(
                f"{key}: {size} samples are not to be shared evenly by {ways} {units}; {nearest(size, ways)} are"
            )
        own = size // ways
        if isinstance(micro_batch, int) and own % micro_batch:
            near = max(one for one in range(1, micro_batch + 1) if own % one == 0)
            raise TextmillError(
                f"engine.micro_batch: {micro_batch} does not divide the {own} samples of a {unit}; {near} does"
            )


def _check_net(config: RunConfig, shape: Any, mesh: Mesh) -> None:
    if config.engine.precision == "fp8":
        raise TextmillError(
            "engine.precision: fp8 is not made for tensor peers; set engine.precision=auto, or engine.mesh.tensor=1"
        )
    for name, size in (("heads", shape.heads), ("inner", shape.inner)):
        if size % mesh.tensor:
            fitting = [str(ways) for ways in range(2, size + 1) if shape.heads % ways == 0 and shape.inner % ways == 0]
            raise TextmillError(
                f"engine.mesh.tensor: {mesh.tensor} does not divide model.shape.{name}={size}; "
                + (
                    f"{', '.join(fitting[:6])} would"
                    if fitting
                    else f"set model.shape.{name}={nearest(size, mesh.tensor)}"
                )
            )
    length = config.train.length or shape.positions
    if mesh.sequence and length % mesh.tensor:
        raise TextmillError(
            f"engine.mesh.sequence_parallel: {mesh.tensor} tensor peers do not share {length} tokens evenly; "
            f"set train.length={nearest(length, mesh.tensor)}, or engine.mesh.sequence_parallel=false"
        )


def nearest(number: int, divisor: int) -> str:
    """The multiples of the divisor on both sides."""
    below = number // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)
