"""What an optimizer step does to the weights: AdamW over all of them, or Muon over block matrices with AdamW over the rest."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from textmill.config import TrainConfig
from textmill.engines.muon_torch import Muon
from textmill.models import Weight
from textmill.models.nets_torch import Net, weights_of

ADAM = {"m": "exp_avg", "v": "exp_avg_sq"}
"""AdamW's moments, by their names in a checkpoint and in torch."""


class Updates:
    """Optimizers and their state; a gradient that is not finite changes nothing, and no step waits for the device."""

    def __init__(self, net: Net, train: TrainConfig, *, compiled: bool = False) -> None:
        self.train, known = train, list(weights_of(net).values())
        matrices = [member for member in known if _is_muons(member[0], train)]
        self.muon = Muon(matrices, net.shape.heads, train.weight_decay, compiled=compiled) if matrices else None
        self.parameters = [parameter for _, parameter in known]
        rest = [member for member in known if not _is_muons(member[0], train)]
        groups = [
            {"params": [parameter for weight, parameter in rest if weight.decay is decays], "weight_decay": train.weight_decay * decays}
            for decays in (True, False)
        ]
        betas = (train.betas[0], train.betas[1])
        self.adam = torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, eps=train.epsilon, fused=True)
        self.rest = [parameter for _, parameter in rest]

    def step(self, lr: float) -> Tensor:
        """One update from the gradients, which are then dropped; return their norm before clipping."""
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        finite = torch.isfinite(norm)
        clip = (self.train.clip / (norm + 1e-6)).clamp_max(1.0) if self.train.clip else torch.ones_like(norm)
        if self.muon:
            self.muon.step(lr, clip, finite)
        for group in self.adam.param_groups:
            group["lr"] = lr * self.train.rest_rate if self.muon else lr
        # The fused update reads both on the device, so that clipping takes no pass of its own and skipping no wait.
        self.adam.grad_scale = clip.reciprocal()  # type: ignore[attr-defined]
        self.adam.found_inf = (~finite).float()  # type: ignore[attr-defined]
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None
        return norm

    def count(self) -> int:
        """Updates done; Adam's own count."""
        state = self.adam.state.get(self.rest[0])
        return int(state["step"]) if state else 0

    def states(self) -> Iterator[tuple[str, dict[nn.Parameter, Tensor]]]:
        """Each kind of state by its name in a checkpoint; none before the first update."""
        if self.count():
            for kind, key in ADAM.items():
                yield kind, {parameter: self.adam.state[parameter][key] for parameter in self.rest}
            if self.muon:
                yield "momentum", self.muon.momentum()

    def take(self, kind: str, parameter: nn.Parameter, values: Tensor, count: int) -> None:
        """Go on with a parameter's state of one kind, after so many updates."""
        if kind == "momentum":
            assert self.muon
            self.muon.take(parameter, values)
            return
        state = self.adam.state[parameter]
        state["step"] = torch.tensor(float(count), device=parameter.device)
        state[ADAM[kind]] = values.to(parameter.device)


def _is_muons(weight: Weight, train: TrainConfig) -> bool:
    return train.optimizer == "muon" and weight.layout in ("linear", "qkv")
