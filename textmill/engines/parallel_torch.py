"""Layout: one net on a mesh of processes: what of it each holds, whose gradients are summed, and whole tensors from parts and back."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from textmill.engines.data_parallel_torch import Replicas
from textmill.engines.meshes import Mesh
from textmill.engines.tensor_parallel_torch import Peers, all_gather, share_out
from textmill.models import Weight


class Layout:
    """The mesh made real. On one process every method does nothing."""

    def __init__(self, mesh: Mesh, rank: int, device: torch.device) -> None:
        self.mesh, self.rank = mesh, rank
        self.sample_part, self.shard_part = rank // mesh.tensor, rank // mesh.tensor % mesh.shard
        self.peers: Peers | None = None
        self.replicas: Replicas | None = None
        self.sharded: list[Any] = []
        """The modules whose parameters lie in parts: all parameters, or none."""
        self.axes: DeviceMesh | None = None
        if mesh.ways * mesh.tensor > 1:
            sizes = (mesh.replicate, mesh.shard, mesh.tensor)
            self.axes = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard", "tensor"))
            if mesh.tensor > 1:
                self.peers = Peers(self._group("tensor"), rank % mesh.tensor, mesh.tensor, mesh.sequence)

    def _group(self, axis: str) -> Any:
        assert self.axes is not None
        return self.axes.get_group(axis)

    def place(self, net: Any) -> None:
        """Leave of an empty net what this process holds."""
        if self.peers:
            share_out(net, self.peers)
        if self.mesh.shard > 1:
            # Imported here: with what it brings it takes a second, which one process, or copies, need not wait for.
            from torch.distributed.fsdp import FSDPModule, fully_shard

            assert self.axes is not None
            axes = self.axes["replicate", "shard"] if self.mesh.replicate > 1 else self.axes["shard"]
            for block in net.h:
                fully_shard(block, mesh=axes, reshard_after_forward=not self.mesh.keep)
            fully_shard(net, mesh=axes)
            self.sharded = [module for module in net.modules() if isinstance(module, FSDPModule)]
            for (
                module
            ) in self.sharded:  # shares of the loss are of the global batch: gradients are summed, never averaged
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of these over copies from now on."""
        if self.mesh.replicate > 1 and self.mesh.shard == 1:
            self.replicas = Replicas(parameters, self._group("replicate"))

    def last_pass(self, last: bool) -> AbstractContextManager[None]:
        """Around a pass over a micro-batch; after the last of a step each gradient is the global batch's."""
        for module in self.sharded:
            module.set_requires_all_reduce(last, recurse=False)
        return self.replicas.last_pass(last) if self.replicas else nullcontext()

    def total(self, value: Tensor) -> Tensor:
        """The sum over all parts of a batch."""
        if self.mesh.ways > 1:
            dist.all_reduce(value)
            value /= self.mesh.tensor
        return value

    def join(self, weights: Iterable[tuple[Weight, Tensor]]) -> None:
        """Make gradients of what tensor peers all hold the same on each: sums where each saw a part, else means of equals."""
        common = [(weight, gradient) for weight, gradient in weights if weight.split is None]
        if self.peers is None or not common:
            return
        flat = torch.cat([gradient.flatten() for _, gradient in common])
        dist.all_reduce(flat, group=self.peers.group)
        for (weight, gradient), values in zip(
            common, torch.split_with_sizes(flat, [one.numel() for _, one in common]), strict=True
        ):
            equals = 1 if self.peers.sequence or weight.partial else self.peers.count
            gradient.copy_(values.view_as(gradient) / equals)

    def norm(self, weights: Iterable[tuple[Weight, Tensor]]) -> Tensor:
        """The norm of all gradients together, each element counted once."""
        counted = [
            gradient
            for weight, gradient in weights
            if weight.split is not None or self.peers is None or not self.peers.rank
        ]
        norm = torch.nn.utils.get_total_norm(counted)
        if self.mesh.shard * self.mesh.tensor > 1:
            squares = norm.square()
            dist.all_reduce(squares)
            norm = (squares / self.mesh.replicate).sqrt()
        return norm

    def own(self, tensor: Any) -> Tensor:
        """What this process holds of a parameter, or of its gradient."""
        held: Tensor = tensor.to_local() if self.sharded else tensor
        return held.detach()

    def whole(self, weight: Weight, parameter: nn.Parameter, own: Tensor) -> Tensor:
        """The whole tensor of which this process holds a part; all processes call it together."""
        if self.sharded:
            own = _gathered(own, parameter.shape[0], self.mesh.shard, self._group("shard"))
        if self.peers and weight.split is not None:
            turned = own.movedim(weight.split, 0)
            own = _gathered(turned, len(turned) * self.peers.count, self.peers.count, self.peers.group).movedim(
                0, weight.split
            )
        return own

    def name_of(self, weight: Weight) -> str:
        """The name of what this process holds of a weight: the same on those that hold the same."""
        parts = [f"shard {self.shard_part}"] if self.sharded else []
        parts += [f"tensor {self.peers.rank}"] if self.peers and weight.split is not None else []
        return f"{weight.name} ({', '.join(parts)})" if parts else weight.name

    def part(self, weight: Weight, whole: Tensor) -> Tensor:
        """What this process holds of a whole tensor."""
        if self.peers and weight.split is not None:
            whole = _cut(whole, weight.split, self.peers.count, self.peers.rank)
        if self.sharded:
            rows = -(-len(whole) // self.mesh.shard)
            whole = whole[self.shard_part * rows : (self.shard_part + 1) * rows]
        return whole

    def rest(self) -> None:
        """Give back weights that were gathered for a forward without a backward."""
        for module in self.sharded:
            module.reshard()


def _cut(whole: Tensor, dim: int, count: int, number: int) -> Tensor:
    """One of several equal parts; what is missing in the last ones is zero."""
    size = -(-whole.shape[dim] // count)
    part = whole.narrow(dim, min(size * number, whole.shape[dim]), max(0, min(size, whole.shape[dim] - size * number)))
    if part.shape[dim] == size:
        return part
    filled = whole.new_zeros([size if one == dim else length for one, length in enumerate(whole.shape)])
    filled.narrow(dim, 0, part.shape[dim]).copy_(part)
    return filled


def _gathered(own: Tensor, rows: int, count: int, group: Any) -> Tensor:
    """All processes' rows, each of which has as many, the last ones maybe fewer."""
    size = -(-rows // count)
    padded = own.new_zeros(size, *own.shape[1:])
    padded[: len(own)] = own
    whole = own.new_empty(size * count, *own.shape[1:])
    all_gather(whole, padded, group=group)
    return whole[:rows]
