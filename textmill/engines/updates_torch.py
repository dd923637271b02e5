"""What an optimizer step does to the weights: AdamW over all of them, or Muon over block matrices with AdamW over the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from textmill.config import TrainConfig
from textmill.engines.layouts_torch import Layout, own_of
from textmill.engines.muon_shared_torch import SharedMuon
from textmill.engines.muon_torch import Member, Muon
from textmill.models import Weight
from textmill.models.nets_torch import Net, weights_of
from textmill.models.rules import rules_of

ADAM = {"m": "exp_avg", "v": "exp_avg_sq"}
"""AdamW's moments, by their names in a checkpoint and in torch."""


class Updates:
    """Optimizers and their state; a gradient that is not finite, or a spike, changes nothing, and no step waits for the device."""

    def __init__(self, net: Net, train: TrainConfig, layout: Layout, *, compiled: bool = False) -> None:
        self.train, self.layout, trained = train, layout, []
        self.own: dict[nn.Parameter, nn.Parameter] = {}
        """Each parameter of the net, and what this process updates of it: the same, where it holds the whole."""
        for weight, parameter, rule in trained_of(net, train):
            self.own[parameter] = nn.Parameter(own_of(parameter)) if isinstance(parameter, DTensor) else parameter
            trained.append((weight, self.own[parameter], rule))
        matrices = [member for member in trained if _is_muons(member[0], train)]
        self.muon = self._muon(net, matrices, compiled=compiled) if matrices else None
        self.parameters = list(self.own)
        self.weights = [(weight, own) for weight, own, _ in trained]
        rest = [member for member in trained if not _is_muons(member[0], train)]
        self.adam = adam_of(rest, train)
        adams = {own for _, own, _ in rest}
        self.rest = [parameter for parameter, own in self.own.items() if own in adams]
        self.trained = sum(math.prod(weight.shape) for weight, _, _ in trained)
        self.done = torch.zeros((), dtype=torch.int64, device=self.parameters[0].device)

    def _muon(self, net: Net, matrices: list[Member], *, compiled: bool) -> Muon | SharedMuon:
        if self.layout.mesh.shard * self.layout.mesh.tensor == 1:
            return Muon(matrices, net.shape.heads, compiled=compiled)
        parameter_of = {own: parameter for parameter, own in self.own.items()}
        return SharedMuon([(member, parameter_of[member[1]]) for member in matrices], net, self.layout, compiled=compiled)

    def step(self, lr: float, scale: Tensor | None = None, spike: Tensor | None = None) -> Tensor:
        """One update from the gradients, which are `scale` times too large and then dropped, or none where there is a spike;
        return their norm before clipping."""
        for parameter, own in self.own.items():
            own.grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        gradients = [(weight, own.grad) for weight, own in self.weights if own.grad is not None]
        self.layout.join(gradients)
        norm = self.layout.norm(gradients)
        norm = norm if scale is None else norm / scale
        kept = torch.isfinite(norm) if spike is None else torch.isfinite(norm) & ~spike
        clip = (self.train.clip / (norm + 1e-6)).clamp_max(1.0) if self.train.clip else torch.ones_like(norm)
        clip = clip if scale is None else clip / scale
        if self.muon:
            self.muon.step(lr, clip, kept)
        for group in self.adam.param_groups:
            group["lr"] = lr * group["rate"] * (self.train.rest_rate if self.muon else 1.0)
        # The fused update reads both on the device, so that clipping takes no pass of its own and skipping no wait.
        self.adam.grad_scale = clip.reciprocal()  # type: ignore[attr-defined]
        self.adam.found_inf = (~kept).float()  # type: ignore[attr-defined]
        self.adam.step()
        self.done += kept
        for parameter, own in self.own.items():
            parameter.grad = own.grad = None
        return norm

    def count(self) -> int:
        """Updates done, skipped ones not counted."""
        return int(self.done)

    def states(self) -> Iterator[tuple[str, dict[nn.Parameter, Tensor]]]:
        """Each kind of state by its name in a checkpoint; none before the first update."""
        if self.count():
            for kind, key in ADAM.items():
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
        state = self.adam.state[self.own[parameter]]
        state["step"] = torch.tensor(float(count), device=parameter.device)
        state[ADAM[kind]] = values.to(parameter.device, copy=True, memory_format=torch.contiguous_format)


def trained_of(net: Net, train: TrainConfig) -> list[Member]:
    """What of a net is trained, and how; nothing else has gradients from now on."""
    rules, members = rules_of(net.shape, train, net.lora), []
    for name, (weight, parameter) in weights_of(net).items():
        parameter.requires_grad_(rules[name].trained)
        if rules[name].trained:
            members.append((weight, parameter, rules[name]))
    return members


def adam_of(members: list[Member], train: TrainConfig) -> torch.optim.AdamW:
    """AdamW with a group for each decay and each rate, a multiple of the step's."""
    # One group of none at least: torch refuses an optimizer without any.
    alike = sorted({(rule.rate, rule.decay) for _, _, rule in members}, reverse=True) or [(1.0, 0.0)]
    groups = [
        {"params": [one for _, one, rule in members if (rule.rate, rule.decay) == key], "weight_decay": key[1], "rate": key[0]}
        for key in alike
    ]
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=(train.betas[0], train.betas[1]), eps=train.epsilon, fused=True)


def _is_muons(weight: Weight, train: TrainConfig) -> bool:
    return train.optimizer == "muon" and weight.layout in ("linear", "qkv")
