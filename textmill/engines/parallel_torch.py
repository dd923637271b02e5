"""Parallel: one net on a mesh of ranks: what each rank has, whose gradients are summed, and tensors from shards and back."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from textmill.engines.data_parallel_torch import DataParallel
from textmill.engines.meshes import Mesh
from textmill.engines.tensor_parallel_torch import TensorParallel, all_gather, divide_net
from textmill.models import Weight
from textmill.models.base_torch import BaseNet


class Parallel:
    """The process groups of a mesh. On one process every method does nothing."""

    def __init__(self, mesh: Mesh, rank: int, device: torch.device) -> None:
        self.mesh, self.rank = mesh, rank
        self.data_rank, self.shard_rank = rank // mesh.tensor, rank // mesh.tensor % mesh.shard
        self.tensor: TensorParallel | None = None
        self.data_parallel: DataParallel | None = None
        self.sharded: list[Any] = []
        """The modules whose parameters FSDP shards: those of all parameters, or none."""
        self.axes: DeviceMesh | None = None
        if mesh.data_ranks * mesh.tensor > 1:
            sizes = (mesh.replicate, mesh.shard, mesh.tensor)
            self.axes = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard", "tensor"))
            if mesh.tensor > 1:
                self.tensor = TensorParallel(self._group("tensor"), rank % mesh.tensor, mesh.tensor, mesh.sequence)

    def _group(self, axis: str) -> Any:
        assert self.axes is not None
        return self.axes.get_group(axis)

    def shard_net(self, net: BaseNet) -> None:
        """Replace the modules of a net without memory by what this rank has of them."""
        if self.tensor:
            divide_net(net, self.tensor)
        if self.mesh.shard > 1:
            # Imported here: it takes a second, which one process, or replicas, need not wait for.
            from torch.distributed.fsdp import FSDPModule, fully_shard

            assert self.axes is not None
            axes = self.axes["replicate", "shard"] if self.mesh.replicate > 1 else self.axes["shard"]
            for block in net.blocks:
                fully_shard(block, mesh=axes, reshard_after_forward=not self.mesh.keep)
            fully_shard(net, mesh=axes)
            self.sharded = [module for module in net.modules() if isinstance(module, FSDPModule)]
            # Each token's weight in the loss is of the global batch: gradients are summed, never averaged.
            for module in self.sharded:
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients of these over replicas from now on."""
        if self.mesh.replicate > 1 and self.mesh.shard == 1:
            self.data_parallel = DataParallel(parameters, self._group("replicate"))

    def during_pass(self, last: bool) -> AbstractContextManager[None]:
        """Around a pass over a micro-batch; after the last of a step each gradient is the global batch's."""
        for module in self.sharded:
            module.set_requires_all_reduce(last, recurse=False)
        return self.data_parallel.during_pass(last) if self.data_parallel else nullcontext()

    def sum_loss(self, value: Tensor) -> Tensor:
        """The sum over all ranks' samples."""
        if self.mesh.data_ranks > 1:
            dist.all_reduce(value)
            value /= self.mesh.tensor
        return value

    def join_gradients(self, weights: Iterable[tuple[Weight, Tensor]]) -> None:
        """Make gradients of what all tensor-parallel ranks have the same on each: sums where each saw a part, else means of equals."""
        common = [(weight, gradient) for weight, gradient in weights if weight.split is None]
        if self.tensor is None or not common:
            return
        flat = torch.cat([gradient.flatten() for _, gradient in common])
        dist.all_reduce(flat, group=self.tensor.group)
        for (weight, gradient), values in zip(
            common, torch.split_with_sizes(flat, [one.numel() for _, one in common]), strict=True
        ):
            equals = 1 if self.tensor.sequence or weight.partial_gradient else self.tensor.count
            gradient.copy_(values.view_as(gradient) / equals)

    def gradient_norm(self, weights: Iterable[tuple[Weight, Tensor]]) -> Tensor:
        """The norm of all gradients together, each element counted once."""
        counted = [
            gradient
            for weight, gradient in weights
            if weight.split is not None or self.tensor is None or not self.tensor.rank
        ]
        norm = torch.nn.utils.get_total_norm(counted)
        if self.mesh.shard * self.mesh.tensor > 1:
            squares = norm.square()
            dist.all_reduce(squares)
            norm = (squares / self.mesh.replicate).sqrt()
        return norm

    def local(self, tensor: Any) -> Tensor:
        """What this rank has of a parameter, or of its gradient."""
        held: Tensor = tensor.to_local() if self.sharded else tensor
        return held.detach()

    def gather(self, weight: Weight, parameter: nn.Parameter, own: Tensor) -> Tensor:
        """The full tensor of which this rank has a part; all ranks call it together."""
        if self.sharded:
            own = _gather_rows(own, parameter.shape[0], self.mesh.shard, self._group("shard"))
        if self.tensor and weight.split is not None:
            turned = own.movedim(weight.split, 0)
            own = _gather_rows(turned, len(turned) * self.tensor.count, self.tensor.count, self.tensor.group).movedim(
                0, weight.split
            )
        return own

    def name_of(self, weight: Weight) -> str:
        """The name of what this rank has of a weight: the same on ranks that have the same."""
        parts = [f"shard {self.shard_rank}"] if self.sharded else []
        parts += [f"tensor {self.tensor.rank}"] if self.tensor and weight.split is not None else []
        return f"{weight.name} ({', '.join(parts)})" if parts else weight.name

    def local_part(self, weight: Weight, whole: Tensor) -> Tensor:
        """What this rank has of a full tensor."""
        if self.tensor and weight.split is not None:
            whole = _take_part(whole, weight.split, self.tensor.count, self.tensor.rank)
        if self.sharded:
            rows = -(-len(whole) // self.mesh.shard)
            whole = whole[self.shard_rank * rows : (self.shard_rank + 1) * rows]
        return whole

    def reshard(self) -> None:
        """Free weights that were gathered for a forward pass without a backward pass."""
        for module in self.sharded:
            module.reshard()


def _take_part(whole: Tensor, dim: int, count: int, number: int) -> Tensor:
    """One of several equal parts; zeros fill up the last ones."""
    size = -(-whole.shape[dim] // count)
    part = whole.narrow(dim, min(size * number, whole.shape[dim]), max(0, min(size, whole.shape[dim] - size * number)))
    if part.shape[dim] == size:
        return part
    filled = whole.new_zeros([size if one == dim else length for one, length in enumerate(whole.shape)])
    filled.narrow(dim, 0, part.shape[dim]).copy_(part)
    return filled


def _gather_rows(own: Tensor, rows: int, count: int, group: Any) -> Tensor:
    """All ranks' rows; each has as many, the last ones maybe fewer."""
    size = -(-rows // count)
    padded = own.new_zeros(size, *own.shape[1:])
    padded[: len(own)] = own
    whole = own.new_empty(size * count, *own.shape[1:])
    all_gather(whole, padded, group=group)
    return whole[:rows]
