"""What an optimizer step does to the weights: AdamW over all of them, or Muon over block matrices with AdamW over the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from textmill.config import TrainConfig
from textmill.engines.muon_torch import Muon
from textmill.models import Weight
from textmill.models.nets_torch import Net, weights_of
from textmill.models.rules import rules_of

ADAM = {"m": "exp_avg", "v": "exp_avg_sq"}
"""AdamW's moments, by their names in a checkpoint and in torch."""


class Updates:
    """Optimizers and their state; a gradient that is not finite changes nothing, and no step waits for the device."""

    def __init__(self, net: Net, train: TrainConfig, *, compiled: bool = False) -> None:
        self.train, rules, trained = train, rules_of(net.shape, train, net.lora), []
        for name, (weight, parameter) in weights_of(net).items():
            parameter.requires_grad_(rules[name].trained)
            if rules[name].trained:
                trained.append((weight, parameter, rules[name]))
        matrices = [member for member in trained if _is_muons(member[0], train)]
        self.muon = Muon(matrices, net.shape.heads, compiled=compiled) if matrices else None
        self.parameters = [parameter for _, parameter, _ in trained]
        rest = [member for member in trained if not _is_muons(member[0], train)]
        # One group of none at least: torch refuses an optimizer without any.
        alike = sorted({(rule.rate, rule.decay) for _, _, rule in rest}, reverse=True) or [(1.0, 0.0)]
        groups = [
            {"params": [one for _, one, rule in rest if (rule.rate, rule.decay) == key], "weight_decay": key[1], "rate": key[0]}
            for key in alike
        ]
        betas = (train.betas[0], train.betas[1])
        self.adam = torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, eps=train.epsilon, fused=True)
        self.rest = [parameter for _, parameter, _ in rest]
        self.trained = sum(math.prod(weight.shape) for weight, _, _ in trained)
        self.done = torch.zeros((), dtype=torch.int64, device=self.parameters[0].device)

    def step(self, lr: float, scale: Tensor | None = None) -> Tensor:
        """One update from the gradients, which are `scale` times too large and then dropped; return their norm before clipping."""
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        norm = norm if scale is None else norm / scale
        finite = torch.isfinite(norm)
        clip = (self.train.clip / (norm + 1e-6)).clamp_max(1.0) if self.train.clip else torch.ones_like(norm)
        clip = clip if scale is None else clip / scale
        if self.muon:
            self.muon.step(lr, clip, finite)
        for group in self.adam.param_groups:
            group["lr"] = lr * group["rate"] * (self.train.rest_rate if self.muon else 1.0)
        # The fused update reads both on the device, so that clipping takes no pass of its own and skipping no wait.
        self.adam.grad_scale = clip.reciprocal()  # type: ignore[attr-defined]
        self.adam.found_inf = (~finite).float()  # type: ignore[attr-defined]
        self.adam.step()
        self.done += finite
        for parameter in self.parameters:
            parameter.grad = None
        return norm

    def count(self) -> int:
        """Updates done, skipped ones not counted."""
        return int(self.done)

    def states(self) -> Iterator[tuple[str, dict[nn.Parameter, Tensor]]]:
        """Each kind of state by its name in a checkpoint; none before the first update."""
        if self.count():
            for kind, key in ADAM.items():
                yield kind, {parameter: self.adam.state[parameter][key] for parameter in self.rest}
            if self.muon:
                yield "momentum", self.muon.momentum()

    def take(self, kind: str, parameter: nn.Parameter, values: Tensor, count: int) -> None:
        """Go on with a parameter's state of one kind, after so many updates."""
        self.done.fill_(count)
        if kind == "momentum":
            assert self.muon
            self.muon.take(parameter, values)
            return
        state = self.adam.state[parameter]
        state["step"] = torch.tensor(float(count), device=parameter.device)
        state[ADAM[kind]] = values.to(parameter.device)


def _is_muons(weight: Weight, train: TrainConfig) -> bool:
    return train.optimizer == "muon" and weight.layout in ("linear", "qkv")
