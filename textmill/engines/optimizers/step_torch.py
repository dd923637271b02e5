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
    """The optimizers and their state; a non-finite gradient or a spike skips the update, decided on the device."""

    def __init__(self, net: BaseNet, train: TrainConfig, parallel: Parallel, *, compiled: bool = False) -> None:
        self.train, self.parallel, trained = train, parallel, []
        self.own: dict[nn.Parameter, nn.Parameter] = {}
        """This rank's part of each parameter of the net: the parameter itself unless FSDP shards it."""
        for weight, parameter, rule in trained_of(net, train):
            self.own[parameter] = nn.Parameter(parallel.local(parameter)) if parallel.sharded else parameter
            trained.append((weight, self.own[parameter], rule))
        matrices = [member for member in trained if uses_muon(member[0], train)]
        self.muon = self._muon(matrices, compiled=compiled) if matrices else None
        self.parameters = list(self.own)
        self.weights = [(weight, own) for weight, own, _ in trained]
        rest = [member for member in trained if not uses_muon(member[0], train)]
        self.adam = Adam([(own, rule) for _, own, rule in rest], train)
        adams = {own for _, own, _ in rest}
        self.rest = [parameter for parameter, own in self.own.items() if own in adams]
        self.trained = sum(math.prod(weight.shape) for weight, _, _ in trained)
        self.done = torch.zeros((), dtype=torch.int64, device=self.parameters[0].device)
        """Updates done, without skipped ones."""

    def _muon(self, matrices: list[Member], *, compiled: bool) -> Muon | ShardedMuon:
        if self.parallel.mesh.shard * self.parallel.mesh.tensor == 1:
            return Muon(matrices, self.train.muon.momentum, compiled=compiled)
        parameter_of = {own: parameter for parameter, own in self.own.items()}
        placed = [(member, parameter_of[member[1]]) for member in matrices]
        return ShardedMuon(placed, self.parallel, self.train.muon.momentum, compiled=compiled)

    def step(self, lr: float, scale: Tensor | None = None, spike: Tensor | None = None) -> Tensor:
        """One update, which a spike skips; returns the gradient norm before clipping.

        The gradients are multiplied by the loss scale `scale`; they are set to None afterwards.
        """
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
        updated = torch.isfinite(norm) if spike is None else torch.isfinite(norm) & ~spike
        clip = (self.train.clip / (norm + 1e-6)).clamp_max(1.0) if self.train.clip else torch.ones_like(norm)
        clip = clip if scale is None else clip / scale
        if self.muon:
            self.muon.step(lr, clip, updated)
        self.adam.step(
            lr * (self.train.muon.adamw_rate_factor if self.muon else 1.0),
            clip.reciprocal(),
            (~updated).float(),
            self.done,
        )
        self.done += updated
        for parameter, own in self.own.items():
            parameter.grad = own.grad = None
        return norm

    def count(self) -> int:
        """Updates done, without skipped ones."""
        return int(self.done)

    def state_weights(self) -> list[Weight]:
        """The weight of each tensor of optimizer state that exists after the first update."""
        return [
            weight for weight, _ in self.weights for _ in range(1 if uses_muon(weight, self.train) else len(MOMENTS))
        ]

    def states(self) -> Iterator[tuple[str, dict[nn.Parameter, Tensor]]]:
        """The optimizer state by kind, as checkpoints name it; none before the first update."""
        if self.count():
            for kind, key in MOMENTS.items():
                yield kind, {parameter: self.adam.state[self.own[parameter]][key] for parameter in self.rest}
            if self.muon:
                yield "momentum", self.muon.momentum()

    def load_state(self, kind: str, parameter: nn.Parameter, values: Tensor, count: int) -> None:
        """Set a parameter's state of one kind after `count` updates; `values` is this rank's part."""
        self.done.fill_(count)
        if kind == "momentum":
            assert self.muon
            self.muon.load_state(parameter, values)
            return
        self.adam.load_state(kind, self.own[parameter], values)


def trained_of(net: BaseNet, train: TrainConfig) -> list[Member]:
    """The trained weights of a net with their rules; freezes all others."""
    rules, members = rules_of(net.shape, train, net.lora), []
    for name, (weight, parameter) in parameters_of(net).items():
        parameter.requires_grad_(rules[name].trained)
        if rules[name].trained:
            members.append((weight, parameter, rules[name]))
    return members


def uses_muon(weight: Weight, train: TrainConfig) -> bool:
    """Whether Muon updates a weight, and not AdamW."""
    return train.optimizer == "muon" and weight.muon
