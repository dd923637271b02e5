"""Muon where processes hold parts of matrices: each has some of them whole, makes their steps, and hands these to all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from textmill.engines.optimizers.muon_torch import Member, Muon
from textmill.engines.parallel_torch import Layout
from textmill.models.nets_torch import Net

Placed = tuple[Member, nn.Parameter]
"""A member, of which a process updates its own part, and the net's parameter that it belongs to."""


class SharedMuon:
    """Matrices go round the processes in turn. The one whose turn it is keeps the whole momentum, so that it lies nowhere twice."""

    def __init__(self, placed: list[Placed], net: Net, layout: Layout, momentum: float, *, compiled: bool) -> None:
        self.placed, self.layout, self.world = placed, layout, dist.get_world_size()
        self.shapes = [weight.shape[::-1] for (weight, _, _), _ in placed]  # outputs x inputs in memory
        self.steps: dict[int, nn.Parameter] = {}
        """By the number of a matrix that is this process's: what its last step was, whole."""
        for number, ((_, own, _), _) in enumerate(placed):
            if number % self.world == layout.rank:
                self.steps[number] = nn.Parameter(torch.zeros(self.shapes[number], device=own.device))
        members = [(placed[number][0][0], step, placed[number][0][2]) for number, step in self.steps.items()]
        self.muon = Muon(members, net.shape.heads, momentum, compiled=compiled)

    @torch.no_grad()
    def step(self, lr: float, clip: Tensor, finite: Tensor) -> None:
        """One update, as Muon's own, of what this process holds of every matrix."""
        for number, ((weight, own, _), parameter) in enumerate(self.placed):
            assert own.grad is not None
            whole = self.layout.whole(weight, parameter, own.grad)
            if number in self.steps:
                self.steps[number].grad = whole
                self.steps[number].zero_()
        self.muon.step(lr, clip, finite)
        for number, ((weight, own, rule), _) in enumerate(self.placed):
            own.mul_(torch.where(finite, 1 - lr * rule.rate * rule.decay, 1.0))
            own.add_(self.layout.part(weight, self._handed(number, self.steps.get(number), own)))
        for step in self.steps.values():
            step.grad = None

    def _handed(self, number: int, whole: Tensor | None, like: Tensor) -> Tensor:
        """A whole matrix, from the process that has it to all."""
        values = like.new_empty(self.shapes[number]) if whole is None else whole.detach().contiguous()
        dist.broadcast(values, number % self.world)
        return values

    def momentum(self) -> dict[nn.Parameter, Tensor]:
        """What this process holds of each matrix' momentum, by the net's parameter."""
        kept, found = self.muon.momentum(), {}
        for number, ((weight, own, _), parameter) in enumerate(self.placed):
            whole = self._handed(number, kept[self.steps[number]] if number in self.steps else None, own)
            found[parameter] = self.layout.part(weight, whole).clone()
        return found

    def take(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Go on with a momentum, of which each process has its part."""
        for number, ((weight, own, _), of) in enumerate(self.placed):
            if of is parameter:
                whole = self.layout.whole(weight, parameter, values.to(own.device))
                if number in self.steps:
                    self.muon.take(self.steps[number], whole)
