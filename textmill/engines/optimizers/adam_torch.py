"""AdamW: our own Triton kernel on a GPU, else torch's fused kernel.

It does not use torch.optim.AdamW, whose import of the compiler takes a third of the start-up time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from textmill.config import TrainConfig
from textmill.kernels.availability import can_run_kernels, load_kernels
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
        self.fused: dict[int, Any] = {}
        """The kernel's tensor addresses of each parameter group."""

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, skipped: Tensor, done: Tensor) -> None:
        """One update with gradients / `scale`, after `done` updates; skipped if `skipped` is 1, read on the device."""
        if not self.groups:
            return
        kernel = load_kernels("textmill.kernels.adam_triton") if can_run_kernels(done) else None
        corrections = self._corrections(done) if kernel is not None else None
        for number, group in enumerate(self.groups):
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state_of(parameter) for parameter in updated]
            rates = lr * group["rate"], group["weight_decay"]
            first, second = ([state[name] for state in states] for name in MOMENTS.values())
            gradients = [parameter.grad for parameter in updated if parameter.grad is not None]
            tensors = updated, gradients, first, second
            if kernel is not None and updated and kernel.can_update_all(tensors):
                fused = self.fused.setdefault(number, kernel.FusedAdamW())
                fused.step(
                    tensors, scale, skipped, corrections, (*rates, *(1 - beta for beta in self.betas), self.epsilon)
                )
            else:
                self._by_torch(tensors, rates, scale, skipped, done)

    def _corrections(self, done: Tensor) -> Tensor:
        """Bias corrections of the next update: 1 - beta1^steps, and the root of 1 - beta2^steps."""
        first, second = (1 - beta ** (done.double() + 1) for beta in self.betas)
        return torch.stack([first, second.sqrt()]).float()

    def _by_torch(
        self, tensors: tuple[Any, ...], rates: tuple[float, float], scale: Tensor, skipped: Tensor, done: Tensor
    ) -> None:
        updated, gradients, first, second = tensors
        steps = list(done.float().repeat(len(updated)).unbind())  # torch increments each, so they are separate tensors
        adamw(
            updated,
            gradients,
            first,
            second,
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
            lr=rates[0],
            weight_decay=rates[1],
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
