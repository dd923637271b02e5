"""The optimizer step in torch: AdamW for all weights, or Muon for block matrices with AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from textmill.config import TrainConfig
from textmill.engines.optimizers.adam_torch import MOMENTS, Adam
from textmill.engines.optimizers.muon_sharded_torch import ShardedMuon
from textmill.engines.optimizers.muon_torch import Member, Muon
from textmill.engines.parallel_torch import Parallel
from textmill.models import Weight
from textmill.models.base_torch import BaseNet
from textmill.models.nets_torch import parameters_of
from textmill.models.parameter_groups import rules_of


class Optimizer:
    """The optimizers and their state; a gradient that is not finite, or a spike, changes nothing; no step waits for the device."""

    def __init__(self, net: BaseNet, train: TrainConfig, parallel: Parallel, *, compiled: bool = False) -> None:
        self.train, self.parallel, trained = train, parallel, []
        self.own: dict[nn.Parameter, nn.Parameter] = {}
        """Each parameter of the net, and what this rank updates of it: the parameter itself unless FSDP shards it."""
        for weight, parameter, rule in trained_of(net, train):
            self.own[parameter] = nn.Parameter(parallel.local(parameter)) if parallel.sharded else parameter
            trained.append((weight, self.own[parameter], rule))
        matrices = [member for member in trained if _uses_muon(member[0], train)]
        self.muon = self._muon(matrices, compiled=compiled) if matrices else None
        self.parameters = list(self.own)
        self.weights = [(weight, own) for weight, own, _ in trained]
        rest = [member for member in trained if not _uses_muon(member[0], train)]
        self.adam = Adam([(own, rule) for _, own, rule in rest], train)
        adams = {own for _, own, _ in rest}
        self.rest = [parameter for parameter, own in self.own.items() if own in adams]
        self.trained = sum(math.prod(weight.shape) for weight, _, _ in trained)
        self.done = torch.zeros((), dtype=torch.int64, device=self.parameters[0].device)
        """Updates done, skipped ones not counted."""

    def _muon(self, matrices: list[Member], *, compiled: bool) -> Muon | ShardedMuon:
        if self.parallel.mesh.shard * self.parallel.mesh.tensor == 1:
            return Muon(matrices, self.train.muon.momentum, compiled=compiled)
        parameter_of = {own: parameter for parameter, own in self.own.items()}
        placed = [(member, parameter_of[member[1]]) for member in matrices]
        return ShardedMuon(placed, self.parallel, self.train.muon.momentum, compiled=compiled)

    def step(self, lr: float, scale: Tensor | None = None, spike: Tensor | None = None) -> Tensor:
        """One update from the gradients, which are `scale` times too large and dropped afterwards; none where there is a spike.

        Returns the gradients' norm before clipping."""
        for parameter, own in self.own.items():
            own.grad = (
                self.parallel.local(parameter.grad)
                if self.parallel.sharded and parameter.grad is not None
                else parameter.grad
            )
        gradients = [(weight, own.grad) for weight, own in self.weights if own.grad is not None]
        self.parallel.join_gradients(gradients)
        norm = self.parallel.gradient_norm(gradients)
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
        """The weight of each tensor of optimizer state, once there is any."""
        return [
            weight for weight, _ in self.weights for _ in range(1 if _uses_muon(weight, self.train) else len(MOMENTS))
        ]

    def states(self) -> Iterator[tuple[str, dict[nn.Parameter, Tensor]]]:
        """Each kind of state by its name in a checkpoint; none before the first update."""
        if self.count():
            for kind, key in MOMENTS.items():
                yield kind, {parameter: self.adam.state[self.own[parameter]][key] for parameter in self.rest}
            if self.muon:
                yield "momentum", self.muon.momentum()

    def take(self, kind: str, parameter: nn.Parameter, values: Tensor, count: int) -> None:
        """Resume with a parameter's state of one kind, after so many updates; the values are what this rank has of it."""
        self.done.fill_(count)
        if kind == "momentum":
            assert self.muon
            self.muon.take(parameter, values)
            return
        self.adam.take(kind, self.own[parameter], values)


def trained_of(net: BaseNet, train: TrainConfig) -> list[Member]:
    """The trained weights of a net with their rules; nothing else has gradients from now on."""
    rules, members = rules_of(net.shape, train, net.lora), []
    for name, (weight, parameter) in parameters_of(net).items():
        parameter.requires_grad_(rules[name].trained)
        if rules[name].trained:
            members.append((weight, parameter, rules[name]))
    return members


def _uses_muon(weight: Weight, train: TrainConfig) -> bool:
    return train.optimizer == "muon" and weight.muon
