"""Muon for sharded matrices: each rank computes the full updates of some of them and broadcasts the results.

Muon needs a matrix as a whole, but a rank has only a part of it. So matrix number n is assigned to rank n % world, its
owner, which has its full momentum. A step of 4 matrices on 2 ranks:

1. All ranks gather the 4 gradients, one at a time. Rank 0 keeps those of 0 and 2, rank 1 those of 1 and 3.
2. Each owner computes the changes of its matrices. It does not have their weights, so Muon updates a parameter of zeros
   in their place: that parameter is the change afterwards. Weight decay has no effect on zeros, so it comes later.
3. Each owner broadcasts its changes, one at a time. Every rank decays its part of the matrix and adds its part of the
   change.
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
        self.changes: dict[int, nn.Parameter] = {}
        """The full change of each matrix that this rank owns, by the matrix's number."""
        members = []
        for number, matrix in enumerate(matrices):
            if self._owner(number) == parallel.rank:
                zeros = torch.zeros(matrix.weight.memory_shape, device=matrix.local_part.device)
                self.changes[number] = nn.Parameter(zeros)
                members.append(Member(matrix.weight, self.changes[number], matrix.rule))
        self.muon = Muon(members, momentum, compiled=compiled)

    def _owner(self, number: int) -> int:
        return number % self.world

    @torch.no_grad()
    def step(self, lr: float, clip: Tensor, finite: Tensor) -> None:
        """Muon's update of this rank's part of every matrix."""
        self._gather_gradients()
        for change in self.changes.values():
            change.zero_()
        self.muon.step(lr, clip, finite)
        for number, matrix in enumerate(self.matrices):
            decay = lr * matrix.rule.rate * matrix.rule.decay
            matrix.local_part.mul_(torch.where(finite, 1 - decay, 1.0))
            full_change = self._broadcast(number, self.changes.get(number))
            matrix.local_part.add_(self.parallel.local_part(matrix.weight, full_change))
        for change in self.changes.values():
            change.grad = None

    def _gather_gradients(self) -> None:
        """Gather the full gradient of every matrix; only its owner keeps it."""
        for number, matrix in enumerate(self.matrices):
            assert matrix.local_part.grad is not None
            full_gradient = self.parallel.gather(matrix.weight, matrix.parameter, matrix.local_part.grad)
            if number in self.changes:
                self.changes[number].grad = full_gradient

    def _broadcast(self, number: int, full: Tensor | None) -> Tensor:
        """Broadcast a full tensor of a matrix's shape from its owner; `full` is None on the other ranks."""
        matrix = self.matrices[number]
        if full is None:
            values = matrix.local_part.new_empty(matrix.weight.memory_shape)
        else:
            values = full.detach().contiguous()
        dist.broadcast(values, self._owner(number))
        return values

    def momentum(self) -> dict[nn.Parameter, Tensor]:
        """This rank's part of each matrix's momentum, by the net's parameter."""
        full_momenta = self.muon.momentum()
        local_momenta = {}
        for number, matrix in enumerate(self.matrices):
            owned = full_momenta[self.changes[number]] if number in self.changes else None
            full = self._broadcast(number, owned)
            local_momenta[matrix.parameter] = self.parallel.local_part(matrix.weight, full).clone()
        return local_momenta

    def load_state(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set the momentum of a parameter from each rank's part of it."""
        for number, matrix in enumerate(self.matrices):
            if matrix.parameter is parameter:
                full = self.parallel.gather(matrix.weight, parameter, values.to(matrix.local_part.device))
                if number in self.changes:
                    self.muon.load_state(self.changes[number], full)
