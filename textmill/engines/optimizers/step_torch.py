"""What an optimizer step does to the weights: AdamW over all of them, or Muon over block matrices with AdamW over the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from textmill.config import TrainConfig
from textmill.engines.optimizers.adam_torch import MOMENTS, Adam
from textmill.engines.optimizers.muon_sharded_torch import SharedMuon
from textmill.engines.optimizers.muon_torch import Member, Muon
from textmill.engines.parallel_torch import Layout
from textmill.models import Weight
from textmill.models.nets_torch import Net, weights_of
from textmill.models.parameter_groups import rules_of


class Updates:
    """Optimizers and their state; a gradient that is not finite, or a spike, changes nothing, and no step waits for the device."""

    def __init__(self, net: Net, train: TrainConfig, layout: Layout, *, compiled: bool = False) -> None:
        self.train, self.layout, trained = train, layout, []
        self.own: dict[nn.Parameter, nn.Parameter] = {}
        """Each parameter of the net, and what this process updates of it: the same, where it holds the whole."""
        for weight, parameter, rule in trained_of(net, train):
            self.own[parameter] = nn.Parameter(layout.own(parameter)) if layout.sharded else parameter
            trained.append((weight, self.own[parameter], rule))
        matrices = [member for member in trained if _is_muons(member[0], train)]
        self.muon = self._muon(net, matrices, compiled=compiled) if matrices else None
        self.parameters = list(self.own)
        self.weights = [(weight, own) for weight, own, _ in trained]
        rest = [member for member in trained if not _is_muons(member[0], train)]
        self.adam = Adam([(own, rule) for _, own, rule in rest], train)
        adams = {own for _, own, _ in rest}
        self.rest = [parameter for parameter, own in self.own.items() if own in adams]
        self.trained = sum(math.prod(weight.shape) for weight, _, _ in trained)
        self.done = torch.zeros((), dtype=torch.int64, device=self.parameters[0].device)
        """Updates done; what is skipped is none."""

    def _muon(self, net: Net, matrices: list[Member], *, compiled: bool) -> Muon | SharedMuon:
        if self.layout.mesh.shard * self.layout.mesh.tensor == 1:
            return Muon(matrices, net.shape.heads, self.train.muon.momentum, compiled=compiled)
        parameter_of = {own: parameter for parameter, own in self.own.items()}
        placed = [(member, parameter_of[member[1]]) for member in matrices]
        return SharedMuon(placed, net, self.layout, self.train.muon.momentum, compiled=compiled)

    def step(self, lr: float, scale: Tensor | None = None, spike: Tensor | None = None) -> Tensor:
        """One update from the gradients, which are `scale` times too large and then dropped, or none where there is a spike;
        return their norm before clipping."""
        for parameter, own in self.own.items():
            own.grad = (
                self.layout.own(parameter.grad)
                if self.layout.sharded and parameter.grad is not None
                else parameter.grad
            )
        gradients = [(weight, own.grad) for weight, own in self.weights if own.grad is not None]
        self.layout.join(gradients)
        norm = self.layout.norm(gradients)
        norm = norm if scale is None else norm / scale
        kept = torch.isfinite(norm) if spike is None else torch.isfinite(norm) & ~spike
        clip = (self.train.clip / (norm + 1e-6)).clamp_max(1.0) if self.train.clip else torch.ones_like(norm)
        clip = clip if scale is None else clip / scale
        if self.muon:
            self.muon.step(lr, clip, kept)
        self.adam.step(
            lr * (self.train.muon.adamw_rate_factor if self.muon else 1.0),
            clip.reciprocal(),
            (~kept).float(),
            self.done,
        )
        self.done += kept
        for parameter, own in self.own.items():
            parameter.grad = own.grad = None
        return norm

    def count(self) -> int:
        """Updates done, skipped ones not counted."""
        return int(self.done)

    def stated(self) -> list[Weight]:
        """What each tensor of state belongs to, once there is any."""
        return [
            weight for weight, _ in self.weights for _ in range(1 if _is_muons(weight, self.train) else len(MOMENTS))
        ]

    def states(self) -> Iterator[tuple[str, dict[nn.Parameter, Tensor]]]:
        """Each kind of state by its name in a checkpoint; none before the first update."""
        if self.count():
            for kind, key in MOMENTS.items():
                yield kind, {parameter: self.adam.state[self.own[parameter]][key] for parameter in self.rest}
            if self.muon:
                yield "momentum", self.muon.momentum()

    def take(self, kind: str, parameter: nn.Parameter, values: Tensor, count: int) -> None:
        """Go on with a parameter's state of one kind, after so many updates; the values are what this process holds of it."""
        self.done.fill_(count)
        if kind == "momentum":
            assert self.muon
            self.muon.take(parameter, values)
            return
        self.adam.take(kind, self.own[parameter], values)


def trained_of(net: Net, train: TrainConfig) -> list[Member]:
    """What of a net is trained, and how; nothing else has gradients from now on."""
    rules, members = rules_of(net.shape, train, net.lora), []
    for name, (weight, parameter) in weights_of(net).items():
        parameter.requires_grad_(rules[name].trained)
        if rules[name].trained:
            members.append((weight, parameter, rules[name]))
    return members


def _is_muons(weight: Weight, train: TrainConfig) -> bool:
    return train.optimizer == "muon" and weight.layout in ("linear", "qkv")
