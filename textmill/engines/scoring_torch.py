"""Nets for evaluation on several processes: each has the full net, or a tensor-parallel group has it together."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from textmill.config import EngineConfig, LoraConfig, TorchEngine
from textmill.devices import open_device
from textmill.engines.meshes import Mesh, check_divides_net
from textmill.engines.parallel_torch import Parallel
from textmill.engines.ranks_torch import TorchRanks
from textmill.engines.tensor_parallel_torch import TensorParallel
from textmill.errors import TextmillError
from textmill.models import Shape
from textmill.models.base_torch import BaseNet
from textmill.models.nets_torch import check_finite_weights, fill, new_net
from textmill.processes.ranks import Ranks
from textmill.storage.tensor_files import Named


class ScoringMesh:
    """How processes divide an evaluation: tensor-parallel groups of `engine.mesh.tensor` ranks share a net, and each
    group has its part of the requests. One process computes everything, whatever mesh the run was trained on."""

    def __init__(self, engine: EngineConfig, ranks: Ranks, *, in_training: bool = False) -> None:
        """`in_training`: an engine trains in this process at the same time."""
        tensor = engine.mesh.tensor if isinstance(engine, TorchEngine) and ranks.world > 1 else 1
        if ranks.world % tensor:
            raise TextmillError(
                f"engine.mesh.tensor: {ranks.world} processes cannot be divided into groups of {tensor}; start "
                f"{tensor} or a multiple of it, or set engine.mesh.tensor=1"
            )
        self.engine = engine
        self.ranks = ranks
        self.in_training = in_training
        self.mesh = Mesh(replicate=ranks.world // tensor, tensor=tensor)

    @property
    def part(self) -> tuple[int, int]:
        """Which part of the requests this process has, and how many parts there are."""
        return self.ranks.rank // self.mesh.tensor, self.mesh.replicate

    @property
    def device(self) -> torch.device:
        """This process's device; the CPU next to an engine that reserves the memory of all devices, as JAX does."""
        if self.in_training and self.engine.one_process:
            return torch.device("cpu")
        return self.ranks.device if isinstance(self.ranks, TorchRanks) else open_device(self.engine.device)

    @cached_property
    def _parallel(self) -> Parallel | None:
        return Parallel(self.mesh, self.ranks.rank, self.device) if self.mesh.tensor > 1 else None

    def new_net(self, shape: Shape, named: Iterable[Named], where: str, lora: LoraConfig | None = None) -> BaseNet:
        """A net with these weights, or this rank's part of it; `where` is the source that error messages name."""
        parallel = self._parallel
        if parallel is None or parallel.tensor is None:
            net = new_net(shape, self.device, lora)
            fill(net, named, where)
            check_finite_weights(net, where)
            return net
        check_divides_net(shape, self.mesh.tensor)
        net = new_net(shape, self.device, lora, parallel.shard_net)
        fill(net, named, where, lambda weight, own, full: own.copy_(parallel.local_part(weight, full)))
        check_finite_weights(net, where)
        gather_logits(net, parallel.tensor)
        return net


def gather_logits(net: BaseNet, tensor: TensorParallel) -> None:
    """Let the net join the logits of all ranks, each of which has some rows of the head."""

    def logits(x_NTE: Tensor) -> Tensor:
        own = F.linear(net.head_input(x_NTE), net.head, net.head_bias).contiguous()
        parts = [torch.empty_like(own) for _ in range(tensor.count)]
        dist.all_gather(parts, own, group=tensor.group)
        return torch.cat(parts, -1)[..., : net.shape.vocab]

    net.logits = logits  # type: ignore[method-assign]
