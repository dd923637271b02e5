"""Bytes of weights, gradients and optimizer state on one device of a JAX mesh, from the shardings themselves."""

from __future__ import annotations

import math

from jax.sharding import AbstractMesh, AxisType

from textmill.config import LoraConfig, TrainConfig
from textmill.engines.memory.parts import State
from textmill.engines.mesh_jax import AXES, Shardings
from textmill.engines.meshes import Mesh
from textmill.engines.optimizers import state_names
from textmill.models import Shape
from textmill.models.lora import weights_with_adapters
from textmill.models.parameter_groups import rules_of


def state_on_mesh(train: TrainConfig, shape: Shape, lora: LoraConfig | None, mesh: Mesh) -> State:
    """The state of a device on a mesh of any size; JAX needs no device for it. Weights are fp32."""
    sizes = (mesh.replicate, mesh.shard, mesh.tensor)
    abstract = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    members = weights_with_adapters(shape, lora)
    shardings = Shardings(abstract, {weight.name: weight.split for weight in members if weight.split is not None})
    rules = rules_of(shape, train, lora)
    weights = gradients = optimizer = 0
    for weight in members:
        sharding = shardings.stored(weight.name, weight.memory_shape)
        shard_bytes = 4 * math.prod(sharding.shard_shape(weight.memory_shape))
        weights += shard_bytes
        if rules[weight.name].trained:
            gradients += shard_bytes
            optimizer += shard_bytes * len(state_names(weight, train))
    return State(weights, gradients, optimizer, 0, elements=weights // 4)
