"""Mesh: how many processes do what; a mesh that does not fit is refused before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from textmill.config import TrainConfig
from textmill.config.engines import MeshConfig
from textmill.errors import TextmillError


@dataclass(frozen=True)
class Mesh:
    """The sizes of the axes."""

    replicate: int = 1

    @property
    def ways(self) -> int:
        """Into how many parts a batch is cut."""
        return self.replicate


def mesh_of(config: MeshConfig, world: int, train: TrainConfig, micro_batch: int | str) -> Mesh:
    """The mesh of so many processes."""
    if config.replicate not in (None, world):
        raise TextmillError(
            f"engine.mesh.replicate: {config.replicate} copies want {config.replicate} processes, found {world}; "
            f"start as many with torchrun --nproc-per-node {config.replicate}, or leave the setting out"
        )
    mesh = Mesh(world)
    for key, size in (("train.batch", train.batch), *(("train.ramp", size) for size in train.ramp[:2])):
        if size % mesh.ways:
            raise TextmillError(
                f"{key}: {size} samples are not to be shared evenly by {mesh.ways} processes; {_nearest(size, mesh.ways)} are"
            )
        own = size // mesh.ways
        if isinstance(micro_batch, int) and own % micro_batch:
            near = max(one for one in range(1, micro_batch + 1) if own % one == 0)
            raise TextmillError(f"engine.micro_batch: {micro_batch} does not divide the {own} samples of a process; {near} does")
    return mesh


def _nearest(number: int, divisor: int) -> str:
    """The multiples of the divisor on both sides."""
    below = number // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)
