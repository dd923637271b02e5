"""Parallel: shards a net over a mesh of ranks, sums gradients over the right ranks, and gathers full tensors.

On 8 ranks with replicate=2, shard=2, tensor=2 a matrix of 12 x 8 with `Weight.split` 0 (column-parallel) is first
divided over the tensor-parallel ranks: 6 x 8 each. FSDP then divides these rows over the shards: 3 x 8 each. The second
replica has the same parts.

    rank                 0  1  2  3  4  5  6  7
    tensor rank          0  1  0  1  0  1  0  1
    shard rank           0  0  1  1  0  0  1  1
    first row it has     0  6  3  9  0  6  3  9

A pipeline has such a mesh for each stage, one after the other (pipeline_torch.py).

`local` is this rank's part of a parameter, `local_part` cuts it out of a full tensor, `gather` is the inverse. Samples
are divided over the 4 data-parallel ranks (replicate x shard); ranks 0 and 1 compute the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from textmill.engines.meshes import Mesh, stage_blocks, stages_of
from textmill.engines.tensor_parallel_torch import TensorParallel, collective, divide_net
from textmill.models import Weight
from textmill.models.base_torch import BaseNet
from textmill.models.lora import weights_with_adapters

BUCKET_BYTES = 25 << 20
"""Bytes of gradients in one all-reduce."""


class Parallel:
    """The process groups of a mesh. On one process no method communicates."""

    def __init__(self, mesh: Mesh, rank: int, device: torch.device) -> None:
        self.mesh = mesh
        self.rank = rank
        self.device = device
        self.data_rank = rank // mesh.tensor % mesh.data_ranks
        self.stage = rank // mesh.tensor // mesh.data_ranks
        """This rank's stage of the pipeline."""
        self.layers = 0
        """Blocks of the net that `shard_net` gets."""
        self.shard_rank = rank // mesh.tensor % mesh.shard
        self.tensor: TensorParallel | None = None
        self.data_parallel: DataParallel | None = None
        self.sharded: list[Any] = []
        """The modules that FSDP shards, which have all parameters; empty without FSDP."""
        self.axes: DeviceMesh | None = None
        if mesh.world > 1:
            sizes = {"replicate": mesh.replicate, "shard": mesh.shard, "tensor": mesh.tensor}
            if mesh.pipeline > 1:
                sizes = {"pipeline": mesh.pipeline, **sizes}
            self.axes = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            if mesh.tensor > 1:
                self.tensor = TensorParallel(self.group("tensor"), rank % mesh.tensor, mesh.tensor, mesh.sequence)

    def group(self, axis: str) -> Any:
        """The ranks that differ from this one in this axis only."""
        assert self.axes is not None
        return self.axes.get_group(axis)

    @property
    def stage_ranks(self) -> range:
        """The ranks of this pipeline stage; all ranks without a pipeline."""
        count = self.mesh.world // self.mesh.pipeline
        return range(self.stage * count, (self.stage + 1) * count)

    def open_stage_group(self) -> Any:
        """A group of `stage_ranks`; all ranks call it together."""
        if self.mesh.pipeline == 1:
            return dist.group.WORLD
        count = len(self.stage_ranks)
        groups = [dist.new_group(range(first, first + count)) for first in range(0, self.mesh.world, count)]
        return groups[self.stage]

    def shard_net(self, net: BaseNet) -> None:
        """Replace the modules of a net on the meta device by this rank's parts of them."""
        if self.tensor:
            divide_net(net, self.tensor)
        self.layers = len(net.blocks)
        if self.mesh.pipeline > 1:
            net.stage_blocks = stage_blocks(self.mesh, self.layers, self.stage)
            net.absent = {
                weight.parameter
                for weight in weights_with_adapters(net.shape, net.lora)
                if self.stage not in self.stages_of(weight)
            }
        if self.mesh.shard > 1:
            self._shard_blocks(net)

    def _shard_blocks(self, net: BaseNet) -> None:
        # Imported here: it takes a second, which runs without FSDP need not wait for.
        from torch.distributed.fsdp import FSDPModule, fully_shard

        assert self.axes is not None
        axes = self.axes["replicate", "shard"] if self.mesh.replicate > 1 else self.axes["shard"]
        absent = {net.get_parameter(name) for name in net.absent}
        for block in net.own_blocks:
            fully_shard(block, mesh=axes, reshard_after_forward=not self.mesh.keep_gathered)
        fully_shard(net, mesh=axes, ignored_params=absent)
        self.sharded = [module for module in net.modules() if isinstance(module, FSDPModule)]
        # Token weights are those of the global batch, so gradients are summed, never averaged.
        for module in self.sharded:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def stages_of(self, weight: Weight) -> list[int]:
        """The stages that have a weight, its owner first."""
        return stages_of(self.mesh, self.layers, weight)

    def is_owner(self, weight: Weight) -> bool:
        """Whether this stage counts a weight: a tied head is counted as the embedding."""
        return self.mesh.pipeline == 1 or self.stages_of(weight)[0] == self.stage

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """From now on, all-reduce the gradients of these parameters over replicas."""
        if self.mesh.replicate > 1 and self.mesh.shard == 1 and self.mesh.local is None:
            self.data_parallel = DataParallel(parameters, self.group("replicate"))

    def during_pass(self, last: bool) -> AbstractContextManager[None]:
        """Around a pass over a micro-batch; the last pass of a step sums gradients over data-parallel ranks."""
        for module in self.sharded:
            module.set_requires_all_reduce(last, recurse=False)
        return self.data_parallel.during_pass(last) if self.data_parallel else nullcontext()

    @property
    def can_repeat_pass(self) -> bool:
        """Whether one rank alone may repeat a pass that failed: not if ranks communicate in its forward pass."""
        return self.mesh.shard * self.mesh.tensor == 1

    def sum_after_passes(self) -> None:
        """Sum the accumulated gradients over replicas, when all passes of a step are done."""
        if self.data_parallel:
            self.data_parallel.sum_all()

    def repeat_pass(self) -> None:
        """Before a pass that repeats a failed one."""
        if self.data_parallel:
            self.data_parallel.repeat_pass()

    def sum_loss(self, value: Tensor) -> Tensor:
        """The sum over all data-parallel ranks; of a pipeline, only the last stage has a loss."""
        if self.mesh.data_ranks * self.mesh.pipeline > 1:
            dist.all_reduce(value)
            value /= self.mesh.tensor * self.workers
        return value

    @property
    def workers(self) -> int:
        """Ranks that compute the loss of their own samples, and not their part of the loss of the batch: local SGD."""
        return self.mesh.replicate if self.mesh.local else 1

    def broadcast(self, axis: str, index: int, tensor: Tensor) -> Tensor:
        """The tensor of the rank with this index in the axis."""
        group = self.group(axis)
        out = tensor.contiguous().clone()
        dist.broadcast(out, dist.get_global_rank(group, index), group=group)
        return out

    def join_gradients(self, weights: Iterable[tuple[Weight, Tensor]]) -> None:
        """Make gradients of weights that all tensor-parallel ranks have in full equal on each of them.

        They are summed if each rank computed a part of the gradient, else averaged.
        """
        undivided = [(weight, gradient) for weight, gradient in weights if weight.split is None]
        if self.tensor is None or not undivided:
            return
        flat = torch.cat([gradient.flatten() for _, gradient in undivided])
        dist.all_reduce(flat, group=self.tensor.group)
        sums = torch.split_with_sizes(flat, [gradient.numel() for _, gradient in undivided])
        for (weight, gradient), total in zip(undivided, sums, strict=True):
            has_part = self.tensor.sequence or weight.partial_gradient
            gradient.copy_(total.view_as(gradient) / (1 if has_part else self.tensor.count))

    def gradient_norm(self, weights: Iterable[tuple[Weight, Tensor]]) -> Tensor:
        """The global gradient norm; elements that several ranks have count once."""
        is_first = self.tensor is None or self.tensor.rank == 0
        counted = [
            gradient for weight, gradient in weights if (weight.split is not None or is_first) and self.is_owner(weight)
        ]
        norm = torch.nn.utils.get_total_norm(counted)
        if self.mesh.shard * self.mesh.ranks_per_sample > 1:
            squares = norm.square()
            dist.all_reduce(squares)
            norm = (squares / self.mesh.replicate).sqrt()
        if self.mesh.local:  # the root mean square, so that all workers clip, or skip an update, alike
            squares = norm.square()
            dist.all_reduce(squares)
            norm = (squares / self.workers).sqrt()
        return norm

    def local(self, tensor: Any) -> Tensor:
        """This rank's part of a parameter, or of its gradient."""
        local: Tensor = tensor.to_local() if self.sharded and hasattr(tensor, "to_local") else tensor
        return local.detach()

    def gather(self, weight: Weight, parameter: nn.Parameter, local_part: Tensor) -> Tensor:
        """The full tensor from this rank's part and those of the others; all ranks call it together."""
        if self.mesh.pipeline == 1:
            return self.gather_on_stage(weight, parameter, local_part)
        owner = self.stages_of(weight)[0]
        if owner == self.stage:
            full = self.gather_on_stage(weight, parameter, local_part)[: weight.outputs]
        else:
            full = torch.empty(weight.memory_shape, device=self.device)
        return self.broadcast("pipeline", owner, full)

    def gather_on_stage(self, weight: Weight, parameter: nn.Parameter, local_part: Tensor) -> Tensor:
        """The full tensor on the ranks of a pipeline stage."""
        tensor = local_part
        if self.sharded:
            tensor = _gather_rows(tensor, parameter.shape[0], self.mesh.shard, self.group("shard"))
        if self.tensor and weight.split is not None:
            count = self.tensor.count
            rows = tensor.movedim(weight.split, 0)
            tensor = _gather_rows(rows, len(rows) * count, count, self.tensor.group).movedim(0, weight.split)
        return tensor

    def name_of(self, weight: Weight) -> str:
        """The name of this rank's part of a weight: equal on ranks that replicate the same part."""
        parts = [f"shard {self.shard_rank}"] if self.sharded else []
        parts += [f"tensor {self.tensor.rank}"] if self.tensor and weight.split is not None else []
        return f"{weight.name} ({', '.join(parts)})" if parts else weight.name

    def local_part(self, weight: Weight, full: Tensor) -> Tensor:
        """This rank's part of a full tensor."""
        if self.tensor and weight.split is not None:
            full = _take_part(full, weight.split, self.tensor.count, self.tensor.rank)
        if self.sharded:
            rows = -(-len(full) // self.mesh.shard)
            full = full[self.shard_rank * rows : (self.shard_rank + 1) * rows]
        return full

    def reshard(self) -> None:
        """Free weights that were gathered for a forward pass without a backward pass."""
        for module in self.sharded:
            module.reshard()


def _take_part(full: Tensor, dim: int, count: int, number: int) -> Tensor:
    """One of several equal parts; the last ones are padded with zeros: part 2 of 3 of [1 2 3 4] is [0 0]."""
    total = full.shape[dim]
    size = -(-total // count)
    part = full.narrow(dim, min(size * number, total), max(0, min(size, total - size * number)))
    if part.shape[dim] == size:
        return part
    padded = full.new_zeros([size if axis == dim else length for axis, length in enumerate(full.shape)])
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    return padded


def _gather_rows(local_rows: Tensor, rows: int, count: int, group: Any) -> Tensor:
    """The rows of all ranks, `rows` in total; the last ranks may have fewer than the others."""
    size = -(-rows // count)
    padded = local_rows.new_zeros(size, *local_rows.shape[1:])
    padded[: len(local_rows)] = local_rows
    return collective("all_gather_into_tensor", padded, count, group.group_name)[:rows]


class DataParallel:
    """Sums gradients over a group. Buckets are fixed, so the order of summation is the same after a resume."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: Any) -> None:
        self.group = group
        self.active = False
        self.pending: list[tuple[Tensor, Any]] = []
        self.buckets = fill_buckets([parameter for parameter in parameters if parameter.requires_grad])
        self.bucket_of = {parameter: number for number, bucket in enumerate(self.buckets) for parameter in bucket}
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)  # type: ignore[no-untyped-call]

    def during_pass(self, last: bool) -> AbstractContextManager[None]:
        """Around a pass over a micro-batch; the last pass of a step all-reduces the accumulated gradients."""
        return self._all_reducing() if last else nullcontext()

    @contextmanager
    def _all_reducing(self) -> Any:
        self.active = True
        self.pending = []
        self.missing = [len(bucket) for bucket in self.buckets]  # gradients of each bucket that are not complete
        yield
        self.active = False
        for bucket, (flat, work) in zip(self.buckets, self.pending, strict=True):
            work.wait()
            gradients = torch.split_with_sizes(flat, [parameter.numel() for parameter in bucket])
            for parameter, gradient in zip(bucket, gradients, strict=True):
                parameter.grad = gradient.view_as(parameter)

    def sum_all(self) -> None:
        """All-reduce the gradients as they are now."""
        with self._all_reducing():
            for bucket in self.buckets:
                self._send(bucket)

    def repeat_pass(self) -> None:
        """Expect the gradients of the last pass once more; buckets that are sent already had all of theirs."""
        if self.active:
            self.missing = [len(bucket) for bucket in self.buckets]

    def _on_gradient(self, parameter: Tensor) -> None:
        """Called when a gradient is complete; all-reduces complete buckets in the same order on every rank."""
        if not self.active:
            return
        self.missing[self.bucket_of[parameter]] -= 1  # type: ignore[index]
        while len(self.pending) < len(self.buckets) and not self.missing[len(self.pending)]:
            self._send(self.buckets[len(self.pending)])

    def _send(self, bucket: list[nn.Parameter]) -> None:
        flat = torch.cat([parameter.grad.flatten() for parameter in bucket if parameter.grad is not None])
        self.pending.append((flat, dist.all_reduce(flat, group=self.group, async_op=True)))


def fill_buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in buckets, last to first: the order in which backward computes their gradients."""
    buckets: list[list[nn.Parameter]] = []
    free_bytes = 0
    for parameter in reversed(parameters):
        if free_bytes < parameter.nbytes:
            buckets.append([])
            free_bytes = BUCKET_BYTES
        buckets[-1].append(parameter)
        free_bytes -= parameter.nbytes
    return buckets
