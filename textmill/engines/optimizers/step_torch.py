"""The optimizer step in torch: AdamW for all weights, or Muon for block matrices with AdamW for the rest.

`Optimizer.step` makes the gradients equal on tensor-parallel ranks, computes their norm over all ranks, clips, and
calls Muon's step (muon_torch.py) and AdamW's (adam_torch.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from textmill.config import TrainConfig
from textmill.engines.optimizers.adam_torch import MOMENTS, Adam
from textmill.engines.optimizers.muon_torch import Member, Muon, ShardedMatrix, ShardedMuon
from textmill.engines.parallel_torch import Parallel
from textmill.models import Weight
from textmill.models.base_torch import BaseNet
from textmill.models.nets_torch import parameters_of
from textmill.models.parameter_groups import rules_of


class Optimizer:
    """The optimizers and their state; a non-finite gradient or a spike skips the update, decided on the device."""

    def __init__(self, net: BaseNet, train: TrainConfig, parallel: Parallel, *, compiled: bool = False) -> None:
        self.train = train
        self.parallel = parallel
        self.local_parts: dict[nn.Parameter, nn.Parameter] = {}
        """This rank's part of each trained parameter of the net: the parameter itself unless FSDP shards it."""
        members = trained_of(net, train)
        for member in members:
            parameter = member.parameter
            self.local_parts[parameter] = nn.Parameter(parallel.local(parameter)) if parallel.sharded else parameter
        self.parameters = list(self.local_parts)
        self.weights = [(member.weight, self.local_parts[member.parameter]) for member in members]
        matrices = [member for member in members if uses_muon(member.weight, train)]
        self.muon = self._new_muon(matrices, compiled=compiled) if matrices else None
        adam_members = [member for member in members if not uses_muon(member.weight, train)]
        self.adam_parameters = [member.parameter for member in adam_members]
        self.adam = Adam([(self.local_parts[member.parameter], member.rule) for member in adam_members], train)
        self.trained = sum(math.prod(member.weight.shape) for member in members)
        """The number of trained parameters."""
        self.done = torch.zeros((), dtype=torch.int64, device=self.parameters[0].device)
        """Updates done, without skipped ones."""

    def _new_muon(self, matrices: list[Member], *, compiled: bool) -> Muon | ShardedMuon:
        momentum = self.train.muon.momentum
        if self.parallel.mesh.shard * self.parallel.mesh.tensor == 1:
            return Muon(matrices, momentum, compiled=compiled)
        sharded = [
            ShardedMatrix(member.weight, member.parameter, self.local_parts[member.parameter], member.rule)
            for member in matrices
        ]
        return ShardedMuon(sharded, self.parallel, momentum, compiled=compiled)

    def step(self, lr: float, loss_scale: Tensor | None = None, spike: Tensor | None = None) -> Tensor:
        """One update, which a spike skips; returns the gradient norm before clipping.

        In fp16 the gradients are those of the loss times `loss_scale`. They are set to None afterwards.
        """
        for parameter, local_part in self.local_parts.items():
            if self.parallel.sharded and parameter.grad is not None:
                local_part.grad = self.parallel.local(parameter.grad)
            else:
                local_part.grad = parameter.grad
        gradients = [(weight, part.grad) for weight, part in self.weights if part.grad is not None]
        self.parallel.join_gradients(gradients)
        norm = self.parallel.gradient_norm(gradients)
        norm = norm if loss_scale is None else norm / loss_scale
        updated = torch.isfinite(norm) if spike is None else torch.isfinite(norm) & ~spike
        clip = (self.train.clip / (norm + 1e-6)).clamp_max(1.0) if self.train.clip else torch.ones_like(norm)
        gradient_factor = clip if loss_scale is None else clip / loss_scale
        adam_lr = lr
        if self.muon:
            self.muon.step(lr, gradient_factor, updated)
            adam_lr = lr * self.train.muon.adamw_rate_factor
        self.adam.step(adam_lr, gradient_factor.reciprocal(), (~updated).float(), self.done)
        self.done += updated
        for parameter, local_part in self.local_parts.items():
            parameter.grad = local_part.grad = None
        return norm

    def count(self) -> int:
        """Updates done, without skipped ones."""
        return int(self.done)

    def state_weights(self) -> list[Weight]:
        """The weight of each tensor of optimizer state after the first update: AdamW has two for each weight."""
        weights = []
        for weight, _ in self.weights:
            weights += [weight] * (1 if uses_muon(weight, self.train) else len(MOMENTS))
        return weights

    def states(self) -> Iterator[tuple[str, dict[nn.Parameter, Tensor]]]:
        """The optimizer state by kind, as checkpoints name it; none before the first update."""
        if self.count():
            for kind, key in MOMENTS.items():
                state = {
                    parameter: self.adam.state[self.local_parts[parameter]][key] for parameter in self.adam_parameters
                }
                yield kind, state
            if self.muon:
                yield "momentum", self.muon.momentum()

    def load_state(self, kind: str, parameter: nn.Parameter, values: Tensor, count: int) -> None:
        """Set a parameter's state of one kind after `count` updates; `values` is this rank's part."""
        self.done.fill_(count)
        if kind == "momentum":
            assert self.muon
            self.muon.load_state(parameter, values)
            return
        self.adam.load_state(kind, self.local_parts[parameter], values)


def trained_of(net: BaseNet, train: TrainConfig) -> list[Member]:
    """The trained weights of a net with their parameters and rules; freezes all others."""
    rules = rules_of(net.shape, train, net.lora)
    members = []
    for name, (weight, parameter) in parameters_of(net).items():
        parameter.requires_grad_(rules[name].trained)
        if rules[name].trained:
            members.append(Member(weight, parameter, rules[name]))
    return members


def uses_muon(weight: Weight, train: TrainConfig) -> bool:
    """Whether Muon updates a weight, and not AdamW."""
    return train.optimizer == "muon" and weight.muon
