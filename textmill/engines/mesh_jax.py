"""How JAX devices divide weights and samples: a mesh of three axes, and the sharding of each array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from textmill.config import JaxMesh
from textmill.errors import TextmillError

AXES = ("replicate", "shard", "tensor")
SAMPLES = ("replicate", "shard")
"""The axes over which samples are divided."""


class Shardings:
    """The sharding of arrays on a mesh; `split` has the axis that tensor-parallel devices divide, by a weight's name."""

    def __init__(self, mesh: Mesh, split: dict[str, int]) -> None:
        self.mesh, self.split = mesh, split
        self.data_devices = mesh.shape["replicate"] * mesh.shape["shard"]

    def stored(self, name: str, shape: Sequence[int]) -> NamedSharding:
        """A weight and its moments between uses: devices of `shard` and `tensor` divide it, where it divides evenly."""
        axes: list[str | None] = self._by_tensor(name, len(shape))
        free = [axis for axis, held in enumerate(axes) if held is None and shape[axis] % self.mesh.shape["shard"] == 0]
        if free:
            axes[max(free, key=lambda axis: shape[axis])] = "shard"
        return self._sharding(*axes)

    def gathered(self, name: str, weight: Array) -> Array:
        """A weight as a matmul reads it: gathered over `shard`, still divided over `tensor`."""
        return jax.lax.with_sharding_constraint(weight, self._sharding(*self._by_tensor(name, weight.ndim)))

    def by_sample(self, x: Array) -> Array:
        """An array whose first axis is samples."""
        return jax.lax.with_sharding_constraint(x, self._sharding(SAMPLES))

    def micro_batches(self) -> NamedSharding:
        """Micro-batches one after another, the samples of each divided: [micro-batches, samples, ...]."""
        return self._sharding(None, SAMPLES)

    def replicated(self) -> NamedSharding:
        """The same on all devices."""
        return self._sharding()

    def _by_tensor(self, name: str, dimensions: int) -> list[str | None]:
        axis = self.split.get(name)
        return ["tensor" if place == axis else None for place in range(dimensions)]

    def _sharding(self, *axes: Any) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))


def open_mesh(config: JaxMesh, devices: list[jax.Device], sizes: dict[str, int]) -> Mesh:
    """The mesh of these devices; what does not divide is refused by name."""
    count, held = len(devices), config.shard * config.tensor
    replicate = config.replicate or max(1, count // held)
    if replicate * held != count:
        wanted = f"replicate={config.replicate or 'auto'}, shard={config.shard}, tensor={config.tensor}"
        raise TextmillError(
            f"engine.mesh: {wanted} need {replicate * held} devices, found {count}; make their product {count}"
        )
    for what, number in sizes.items():
        if number % config.tensor:
            near = max(size for size in range(1, config.tensor + 1) if all(many % size == 0 for many in sizes.values()))
            raise TextmillError(
                f"engine.mesh.tensor: {config.tensor} does not divide the net's {number} {what}; {near} does"
            )
    together = len(devices) // (1 + max(device.process_index for device in devices))
    if together % config.tensor:
        raise TextmillError(
            f"engine.mesh.tensor: {config.tensor} devices compute together, and a process has {together}; lower it"
        )
    shape = (replicate, config.shard, config.tensor)
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
