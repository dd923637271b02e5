"""Bytes of weights, gradients and optimizer state on one rank, counted on the sharded net itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from textmill.config import LoraConfig, TrainConfig
from textmill.engines.memory.parts import State
from textmill.engines.meshes import Mesh
from textmill.engines.optimizers import Member, open_optimizer, optimizer_of, trained_of
from textmill.engines.parallel_torch import BUCKET_BYTES, Parallel
from textmill.models import Shape
from textmill.models.base_torch import BaseNet
from textmill.models.nets_torch import build_net, own_parameters_of

FIRST_GROUP = 1 << 20
"""The number of the first fake process group: torch names groups by their numbers."""


def state_on_mesh(train: TrainConfig, shape: Shape, lora: LoraConfig | None, mesh: Mesh) -> State:
    """The state of rank 0, which has the most, on a mesh of any size: nothing is allocated and nothing is sent."""
    with fake_ranks(mesh.world):
        parallel = Parallel(mesh, 0, torch.device("cpu"))
        with torch.device("meta"):
            net = build_net(shape, lora)
            parallel.shard_net(net)
        return count_state(net, train, parallel)


def count_state(net: BaseNet, train: TrainConfig, parallel: Parallel) -> State:
    """The state of this rank after its first step; the net may be on the meta device."""
    local_parts = {parameter: parallel.local(parameter) for _, parameter in own_parameters_of(net)}
    weights = sum(part.nbytes for part in local_parts.values())
    members: dict[str, list[Member]] = {}
    for member in trained_of(net, train):
        members.setdefault(optimizer_of(member.weight, train), []).append(member)
    gradients = sum(local_parts[parameter].nbytes for group in members.values() for _, parameter, _ in group)
    state = sum(open_optimizer(name).state_bytes(group, parallel) for name, group in members.items())
    average = gradients if train.ema_window else 0
    shared = 2 * gradients if parallel.mesh.local else 0  # local SGD: the shared weights, and the outer momentum
    in_blocks = [parameter for parameter in net.blocks.parameters() if parameter in local_parts]
    return State(
        weights,
        gradients,
        optimizer=state + average + shared,
        buffers=_buffers(net, parallel, gradients),
        elements=sum(part.numel() for part in local_parts.values()),
        outside_blocks=weights - sum(local_parts[parameter].nbytes for parameter in in_blocks),
    )


def _buffers(net: BaseNet, parallel: Parallel, gradients: int) -> int:
    """Bytes for collectives: flat gradients of data parallelism; with FSDP the weights that are gathered at once."""
    if not parallel.sharded:
        if parallel.mesh.local:
            return min(gradients, BUCKET_BYTES)
        return gradients if parallel.mesh.replicate > 1 else 0
    blocks = [_full_bytes(block) for block in net.own_blocks]
    here = sum(_bytes(parameter) for name, parameter in net.named_parameters() if name not in net.absent)
    rest = here - sum(blocks)
    # The block that computes, the next one that is gathered meanwhile, and the gradients of one block.
    gathered = sum(blocks) if parallel.mesh.keep_gathered else 2 * max(blocks)
    return rest + gathered + max(blocks)


def _full_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters when FSDP has gathered them."""
    return sum(_bytes(parameter) for parameter in module.parameters())


def _bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """A process group of so many ranks, of which this process is rank 0 and the others do not exist."""
    if world == 1:
        yield
        return
    # Imported here: only plans of several devices need them.
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    # The process may have groups already: another world, with names that they do not use.
    before = distributed_c10d._world
    world_of_ranks = ThreadLocalWorld()
    world_of_ranks.group_count = FIRST_GROUP
    if not hasattr(world_of_ranks, "comms"):
        vars(world_of_ranks)["comms"] = []  # torch 2.11 reads it, but this kind of world lacks it there
    distributed_c10d._world = world_of_ranks  # type: ignore[assignment]
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        yield
        dist.destroy_process_group()
    finally:
        distributed_c10d._world = before
