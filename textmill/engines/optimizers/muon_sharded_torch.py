"""Muon for sharded matrices: each rank gathers some of them, computes their steps and broadcasts the results.

Matrix number n belongs to rank n % world: that rank has its full momentum. A step of 4 matrices on 2 ranks: all ranks
gather the 4 gradients, one at a time; rank 0 keeps those of 0 and 2 and computes their steps, rank 1 those of 1 and 3;
each step is broadcast, and every rank adds its own part of it to its own part of the matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from textmill.engines.optimizers.muon_torch import Member, Muon
from textmill.engines.parallel_torch import Parallel
from textmill.models import Weight
from textmill.models.parameter_groups import Rule


class ShardedMatrix(NamedTuple):
    """A matrix of which each rank updates its own part."""

    weight: Weight
    parameter: nn.Parameter
    """The net's parameter."""
    local_part: nn.Parameter
    """This rank's part of it."""
    rule: Rule


class ShardedMuon:
    """Muon over matrices that are assigned to ranks round-robin."""

    def __init__(self, matrices: list[ShardedMatrix], parallel: Parallel, momentum: float, *, compiled: bool) -> None:
        self.matrices, self.parallel, self.world = matrices, parallel, dist.get_world_size()
        self.steps: dict[int, nn.Parameter] = {}
        """The last full step of each matrix of this rank, by number: a weight of 0 that Muon updates."""
        for number, matrix in enumerate(matrices):
            if number % self.world == parallel.rank:
                zeros = torch.zeros(matrix.weight.memory_shape, device=matrix.local_part.device)
                self.steps[number] = nn.Parameter(zeros)
        members = [Member(matrices[number].weight, step, matrices[number].rule) for number, step in self.steps.items()]
        self.muon = Muon(members, momentum, compiled=compiled)

    @torch.no_grad()
    def step(self, lr: float, clip: Tensor, finite: Tensor) -> None:
        """Muon's update of this rank's part of every matrix."""
        for number, matrix in enumerate(self.matrices):
            assert matrix.local_part.grad is not None
            full_gradient = self.parallel.gather(matrix.weight, matrix.parameter, matrix.local_part.grad)
            if number in self.steps:
                self.steps[number].grad = full_gradient
                self.steps[number].zero_()
        self.muon.step(lr, clip, finite)
        for number, matrix in enumerate(self.matrices):
            matrix.local_part.mul_(torch.where(finite, 1 - lr * matrix.rule.rate * matrix.rule.decay, 1.0))
            full_step = self._broadcast(number, self.steps.get(number))
            matrix.local_part.add_(self.parallel.local_part(matrix.weight, full_step))
        for step in self.steps.values():
            step.grad = None

    def _broadcast(self, number: int, full: Tensor | None) -> Tensor:
        """Broadcast a full matrix from the rank that it belongs to; `full` is None on the others."""
        matrix = self.matrices[number]
        if full is None:
            values = matrix.local_part.new_empty(matrix.weight.memory_shape)
        else:
            values = full.detach().contiguous()
        dist.broadcast(values, number % self.world)
        return values

    def momentum(self) -> dict[nn.Parameter, Tensor]:
        """This rank's part of each matrix's momentum, by the net's parameter."""
        full_momenta, local_momenta = self.muon.momentum(), {}
        for number, matrix in enumerate(self.matrices):
            full = full_momenta[self.steps[number]] if number in self.steps else None
            local_part = self.parallel.local_part(matrix.weight, self._broadcast(number, full))
            local_momenta[matrix.parameter] = local_part.clone()
        return local_momenta

    def load_state(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set the momentum of a parameter from each rank's part of it."""
        for number, matrix in enumerate(self.matrices):
            if matrix.parameter is parameter:
                full = self.parallel.gather(matrix.weight, parameter, values.to(matrix.local_part.device))
                if number in self.steps:
                    self.muon.load_state(self.steps[number], full)
