"""Muon where ranks have shards of matrices: each rank gathers some of them, computes their steps, and broadcasts these."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from textmill.engines.optimizers.muon_torch import Member, Muon
from textmill.engines.parallel_torch import Parallel

Placed = tuple[Member, nn.Parameter]
"""A member, of which a rank updates its own part, and the net's parameter that it belongs to."""


class ShardedMuon:
    """Matrices are dealt to the ranks in turn. A matrix' rank keeps its full momentum, so that none is stored twice."""

    def __init__(self, placed: list[Placed], parallel: Parallel, momentum: float, *, compiled: bool) -> None:
        self.placed, self.parallel, self.world = placed, parallel, dist.get_world_size()
        self.shapes = [weight.memory_shape for (weight, _, _), _ in placed]
        self.steps: dict[int, nn.Parameter] = {}
        """This rank's matrices by number: the last step of each, in full."""
        for number, ((_, own, _), _) in enumerate(placed):
            if number % self.world == parallel.rank:
                self.steps[number] = nn.Parameter(torch.zeros(self.shapes[number], device=own.device))
        members = [(placed[number][0][0], step, placed[number][0][2]) for number, step in self.steps.items()]
        self.muon = Muon(members, momentum, compiled=compiled)

    @torch.no_grad()
    def step(self, lr: float, clip: Tensor, finite: Tensor) -> None:
        """One update, equal to Muon's own, of what this rank has of every matrix."""
        for number, ((weight, own, _), parameter) in enumerate(self.placed):
            assert own.grad is not None
            whole = self.parallel.gather(weight, parameter, own.grad)
            if number in self.steps:
                self.steps[number].grad = whole
                self.steps[number].zero_()
        self.muon.step(lr, clip, finite)
        for number, ((weight, own, rule), _) in enumerate(self.placed):
            own.mul_(torch.where(finite, 1 - lr * rule.rate * rule.decay, 1.0))
            own.add_(self.parallel.local_part(weight, self._broadcast(number, self.steps.get(number), own)))
        for step in self.steps.values():
            step.grad = None

    def _broadcast(self, number: int, whole: Tensor | None, like: Tensor) -> Tensor:
        """A full matrix, from the rank that has it to all."""
        values = like.new_empty(self.shapes[number]) if whole is None else whole.detach().contiguous()
        dist.broadcast(values, number % self.world)
        return values

    def momentum(self) -> dict[nn.Parameter, Tensor]:
        """What this rank has of each matrix' momentum, by the net's parameter."""
        kept, found = self.muon.momentum(), {}
        for number, ((weight, own, _), parameter) in enumerate(self.placed):
            whole = self._broadcast(number, kept[self.steps[number]] if number in self.steps else None, own)
            found[parameter] = self.parallel.local_part(weight, whole).clone()
        return found

    def take(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Resume with a momentum, of which each rank has its part."""
        for number, ((weight, own, _), of) in enumerate(self.placed):
            if of is parameter:
                whole = self.parallel.gather(weight, parameter, values.to(own.device))
                if number in self.steps:
                    self.muon.take(self.steps[number], whole)
