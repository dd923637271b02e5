"""AdamW by torch's fused kernel, with gradients that are scaled and updates that are skipped on the device.

It does not use torch.optim.AdamW, whose import of the compiler takes a third of the start-up time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from textmill.config import TrainConfig
from textmill.models.parameter_groups import Rule

MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}
"""AdamW's moments: names in a checkpoint -> names in torch."""


def groups_of(members: Iterable[tuple[nn.Parameter, Rule]]) -> list[dict[str, Any]]:
    """Parameter groups by learning-rate factor (`rate`) and weight decay."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter, rule in members:
        groups.setdefault((rule.rate, rule.decay), []).append(parameter)
    return [{"params": groups[key], "weight_decay": key[1], "rate": key[0]} for key in sorted(groups, reverse=True)]


class Adam:
    """AdamW's update; `state` has the moments of each parameter under torch's names."""

    def __init__(self, members: Iterable[tuple[nn.Parameter, Rule]], train: TrainConfig) -> None:
        self.groups = groups_of(members)
        self.betas = train.betas
        self.epsilon = train.epsilon
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, skipped: Tensor, done: Tensor) -> None:
        """One update with gradients / `scale`, after `done` updates; skipped if `skipped` is 1, read on the device."""
        for group in self.groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state_of(parameter) for parameter in updated]
            steps = list(done.float().repeat(len(updated)).unbind())  # torch increments each: they are separate tensors
            adamw(
                updated,
                [parameter.grad for parameter in updated if parameter.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                fused=True,
                grad_scale=scale,
                found_inf=skipped,
                amsgrad=False,
                maximize=False,
                eps=self.epsilon,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=lr * group["rate"],
                weight_decay=group["weight_decay"],
            )

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter not in self.state:
            self.state[parameter] = {
                name: torch.zeros_like(parameter, memory_format=torch.contiguous_format) for name in MOMENTS.values()
            }
        return self.state[parameter]

    def load_state(self, kind: str, parameter: nn.Parameter, values: Tensor) -> None:
        """Set a parameter's moment `m` or `v`."""
        moment = values.to(parameter.device, copy=True, memory_format=torch.contiguous_format)
        self.state.setdefault(parameter, {})[MOMENTS[kind]] = moment
