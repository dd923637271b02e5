"""AdamW by torch's fused kernel, without torch's class around it, which imports a compiler: a third of what a start takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from textmill.config import TrainConfig
from textmill.models.rules import Rule

MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}
"""AdamW's moments, by their names in a checkpoint and in torch."""


def groups_of(members: Iterable[tuple[nn.Parameter, Rule]]) -> list[dict[str, Any]]:
    """A group for each decay and each rate, a multiple of the step's."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter, rule in members:
        groups.setdefault((rule.rate, rule.decay), []).append(parameter)
    return [{"params": groups[key], "weight_decay": key[1], "rate": key[0]} for key in sorted(groups, reverse=True)]


class Adam:
    """The state of each parameter under torch's names, and its update."""

    def __init__(self, members: Iterable[tuple[nn.Parameter, Rule]], train: TrainConfig) -> None:
        self.groups, self.betas, self.epsilon = groups_of(members), train.betas, train.epsilon
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, skipped: Tensor) -> None:
        """One update by gradients over `scale`, none where `skipped` is 1: both are read on the device, so that nothing waits."""
        for group in self.groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state_of(parameter) for parameter in moved]
            first, second, steps = ([state[name] for state in states] for name in (*MOMENTS.values(), "step"))
            adamw(
                moved, [parameter.grad for parameter in moved], first, second, [], steps,
                fused=True, grad_scale=scale, found_inf=skipped, amsgrad=False, maximize=False, eps=self.epsilon,
                beta1=self.betas[0], beta2=self.betas[1], lr=lr * group["rate"], weight_decay=group["weight_decay"],
            )  # fmt: skip

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter not in self.state:
            zeros = {name: torch.zeros_like(parameter) for name in MOMENTS.values()}
            self.state[parameter] = {**zeros, "step": torch.zeros((), device=parameter.device)}
        return self.state[parameter]

    def take(self, kind: str, parameter: nn.Parameter, values: Tensor, count: int) -> None:
        """Go on with a parameter's moment of one kind, after so many updates."""
        state = self.state.setdefault(parameter, {})
        state["step"] = torch.tensor(float(count), device=parameter.device)
        state[MOMENTS[kind]] = values.to(parameter.device, copy=True, memory_format=torch.contiguous_format)
