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
from textmill.engines.optimizers import Member
from textmill.engines.parallel_torch import Parallel
from textmill.models import Weight
from textmill.models.parameter_groups import Rule

STATE = ("m", "v")
"""The first and the second moment."""
TORCH_NAMES = {"m": "exp_avg", "v": "exp_avg_sq"}


def takes(weight: Weight) -> bool:
    """AdamW updates any weight."""
    return True


def adamw_rate(train: TrainConfig) -> float:
    """It is AdamW itself."""
    return 1.0


def state_bytes(members: list[Member], parallel: Parallel) -> int:
    """Two moments of this rank's parts."""
    return len(STATE) * sum(parallel.local(parameter).nbytes for _, parameter, _ in members)


def new_optimizer(
    members: list[Member],
    train: TrainConfig,
    parallel: Parallel,
    full_parameters: dict[nn.Parameter, nn.Parameter],
    *,
    compiled: bool,
) -> AdamW:
    """AdamW needs no more than this rank's parts."""
    return AdamW(((parameter, rule) for _, parameter, rule in members), train)


def groups_of(members: Iterable[tuple[nn.Parameter, Rule]]) -> list[dict[str, Any]]:
    """Parameter groups by learning-rate factor (`rate`) and weight decay."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter, rule in members:
        groups.setdefault((rule.rate, rule.decay), []).append(parameter)
    return [{"params": groups[key], "weight_decay": key[1], "rate": key[0]} for key in sorted(groups, reverse=True)]


class AdamW:
    """AdamW's update; `moments` has those of each parameter by the names of STATE."""

    def __init__(self, members: Iterable[tuple[nn.Parameter, Rule]], train: TrainConfig) -> None:
        self.groups = groups_of(members)
        self.betas = train.betas
        self.epsilon = train.epsilon
        self.moments: dict[nn.Parameter, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, lr: float | Tensor, gradient_factor: Tensor, updated: Tensor, done: Tensor) -> None:
        """One update by torch's fused kernel."""
        scale = gradient_factor.reciprocal()
        skipped = (~updated).float()
        for group in self.groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            moments = [self._moments_of(parameter) for parameter in parameters]
            adamw(
                parameters,
                [parameter.grad for parameter in parameters if parameter.grad is not None],
                [one["m"] for one in moments],
                [one["v"] for one in moments],
                [],
                # Torch increments each, so they are separate tensors.
                list(done.float().repeat(len(parameters)).unbind()),
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

    def _moments_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter not in self.moments:
            self.moments[parameter] = {
                name: torch.zeros_like(parameter, memory_format=torch.contiguous_format) for name in STATE
            }
        return self.moments[parameter]

    def state(self) -> dict[str, dict[nn.Parameter, Tensor]]:
        """The moments of each parameter."""
        return {name: {parameter: moments[name] for parameter, moments in self.moments.items()} for name in STATE}

    def load_state(self, name: str, parameter: nn.Parameter, values: Tensor) -> None:
        """Set a parameter's moment."""
        moment = values.to(parameter.device, copy=True, memory_format=torch.contiguous_format)
        self.moments.setdefault(parameter, {})[name] = moment
