"""Bytes of weights, gradients and optimizer state on one device of a JAX mesh, from the shardings themselves."""

from __future__ import annotations

import math

from jax.sharding import AbstractMesh, AxisType

from textmill.config import RunConfig
from textmill.engines.memory.parts import State
from textmill.engines.mesh_jax import AXES, Shardings
from textmill.engines.meshes import Mesh
from textmill.models import Shape
from textmill.models.lora import weights_with_adapters
from textmill.models.parameter_groups import rules_of


def state_on_mesh(config: RunConfig, shape: Shape, mesh: Mesh, itemsize: int = 4) -> State:
    """The state of a device on a mesh of any size; JAX needs no device for it. Weights are fp32."""
    sizes = (mesh.replicate, mesh.shard, mesh.tensor)
    abstract = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    members = weights_with_adapters(shape, config.model.lora)
    shardings = Shardings(abstract, {one.name: one.split for one in members if one.split is not None})
    rules, weights, gradients, optimizer = rules_of(shape, config.train, config.model.lora), 0, 0, 0
    for one in members:
        held = 4 * math.prod(shardings.stored(one.name, one.memory_shape).shard_shape(one.memory_shape))
        weights += held
        if rules[one.name].trained:
            gradients += held
            optimizer += held if config.train.optimizer == "muon" and one.muon else 2 * held
    return State(weights, gradients, optimizer, 0, elements=weights // 4)
