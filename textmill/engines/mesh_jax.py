"""The mesh of JAX devices with its three axes, and the sharding of each array on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from textmill.engines.meshes import Mesh as MeshSizes
from textmill.errors import TextmillError

AXES = ("replicate", "shard", "tensor")
SAMPLES = ("replicate", "shard")
"""The axes that divide the samples."""


class Shardings:
    """The sharding of arrays on a mesh; `split` is the tensor-parallel axis of each weight that has one, by name."""

    def __init__(self, mesh: Mesh, split: dict[str, int]) -> None:
        self.mesh = mesh
        self.split = split
        self.data_devices = mesh.shape["replicate"] * mesh.shape["shard"]

    def stored(self, name: str, shape: Sequence[int]) -> NamedSharding:
        """How a weight and its moments are stored: divided over `shard` and `tensor` where it divides evenly."""
        axes: list[str | None] = self._by_tensor(name, len(shape))
        free = [axis for axis, used in enumerate(axes) if used is None and shape[axis] % self.mesh.shape["shard"] == 0]
        if free:
            axes[max(free, key=lambda axis: shape[axis])] = "shard"
        return self._sharding(*axes)

    def gathered(self, name: str, weight: Array) -> Array:
        """A weight as a matmul reads it: gathered over `shard`, still divided over `tensor`."""
        return jax.lax.with_sharding_constraint(weight, self._sharding(*self._by_tensor(name, weight.ndim)))

    def by_sample(self, x: Array) -> Array:
        """An array divided by samples, its first axis."""
        return jax.lax.with_sharding_constraint(x, self._sharding(SAMPLES))

    def micro_batches(self) -> NamedSharding:
        """The sharding of [micro-batches, samples, ...]: divided by samples."""
        return self._sharding(None, SAMPLES)

    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device has in full."""
        return self._sharding()

    def replicate(self, values: Any) -> Array:
        """A small array on every device."""
        return jax.make_array_from_callback(np.shape(values), self.replicated(), lambda index: values[index])

    def place(self, name: str, values: Any) -> Array:
        """An array with the stored sharding of a weight."""
        return jax.make_array_from_callback(values.shape, self.stored(name, values.shape), lambda index: values[index])

    def _by_tensor(self, name: str, dimensions: int) -> list[str | None]:
        axis = self.split.get(name)
        return ["tensor" if place == axis else None for place in range(dimensions)]

    def _sharding(self, *axes: Any) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))


def place_mesh(sizes: MeshSizes, devices: list[jax.Device]) -> Mesh:
    """The mesh of these devices."""
    local = len(devices) // (1 + max(device.process_index for device in devices))
    if local % sizes.tensor:
        raise TextmillError(
            f"engine.mesh.tensor: a process has {local} devices, which {sizes.tensor} does not divide; lower it"
        )
    shape = (sizes.replicate, sizes.shard, sizes.tensor)
    return Mesh(np.array(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
