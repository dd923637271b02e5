"""Muon for sharded matrices: each rank gathers some of them, computes their steps and broadcasts the results."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from textmill.engines.optimizers.muon_torch import Member, Muon
from textmill.engines.parallel_torch import Parallel

Placed = tuple[Member, nn.Parameter]
"""A matrix, of which a rank updates its own part, and the net's parameter."""


class ShardedMuon:
    """Matrices are assigned to ranks round-robin; only the rank of a matrix stores its (full) momentum."""

    def __init__(self, placed: list[Placed], parallel: Parallel, momentum: float, *, compiled: bool) -> None:
        self.placed, self.parallel, self.world = placed, parallel, dist.get_world_size()
        self.shapes = [weight.memory_shape for (weight, _, _), _ in placed]
        self.steps: dict[int, nn.Parameter] = {}
        """The last full step of each matrix of this rank, by number."""
        for number, ((_, own, _), _) in enumerate(placed):
            if number % self.world == parallel.rank:
                self.steps[number] = nn.Parameter(torch.zeros(self.shapes[number], device=own.device))
        members = [(placed[number][0][0], step, placed[number][0][2]) for number, step in self.steps.items()]
        self.muon = Muon(members, momentum, compiled=compiled)

    @torch.no_grad()
    def step(self, lr: float, clip: Tensor, finite: Tensor) -> None:
        """Muon's update of this rank's part of every matrix."""
        for number, ((weight, own, _), parameter) in enumerate(self.placed):
            assert own.grad is not None
            full = self.parallel.gather(weight, parameter, own.grad)
            if number in self.steps:
                self.steps[number].grad = full
                self.steps[number].zero_()
        self.muon.step(lr, clip, finite)
        for number, ((weight, own, rule), _) in enumerate(self.placed):
            own.mul_(torch.where(finite, 1 - lr * rule.rate * rule.decay, 1.0))
            own.add_(self.parallel.local_part(weight, self._broadcast(number, self.steps.get(number), own)))
        for step in self.steps.values():
            step.grad = None

    def _broadcast(self, number: int, full: Tensor | None, like: Tensor) -> Tensor:
        """Broadcast a full matrix from the rank that has it."""
        values = like.new_empty(self.shapes[number]) if full is None else full.detach().contiguous()
        dist.broadcast(values, number % self.world)
        return values

    def momentum(self) -> dict[nn.Parameter, Tensor]:
        """This rank's part of each matrix's momentum, by the net's parameter."""
        momenta, found = self.muon.momentum(), {}
        for number, ((weight, own, _), parameter) in enumerate(self.placed):
            full = self._broadcast(number, momenta[self.steps[number]] if number in self.steps else None, own)
            found[parameter] = self.parallel.local_part(weight, full).clone()
        return found

    def load_state(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set the momentum of a parameter from each rank's part of it."""
        for number, ((weight, own, _), owner) in enumerate(self.placed):
            if owner is parameter:
                full = self.parallel.gather(weight, parameter, values.to(own.device))
                if number in self.steps:
                    self.muon.load_state(self.steps[number], full)
