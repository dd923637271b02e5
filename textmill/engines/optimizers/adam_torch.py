"""AdamW by a kernel of our own on a GPU, else by torch's fused one, without torch's class around it.

That class imports a compiler: a third of what a start takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from textmill.config import TrainConfig
from textmill.engines.shared_torch import kernels
from textmill.models.parameter_groups import Rule

MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq"}
"""AdamW's moments, by their names in a checkpoint and in torch."""


def groups_of(members: Iterable[tuple[nn.Parameter, Rule]]) -> list[dict[str, Any]]:
    """A group for each decay and each rate, a multiple of the step's."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter, rule in members:
        groups.setdefault((rule.rate, rule.decay), []).append(parameter)
    return [{"params": groups[key], "weight_decay": key[1], "rate": key[0]} for key in sorted(groups, reverse=True)]


class Adam:
    """The moments of each parameter under torch's names, and its update: on a GPU by a kernel of our own, else by torch's fused one."""

    def __init__(self, members: Iterable[tuple[nn.Parameter, Rule]], train: TrainConfig) -> None:
        self.groups, self.betas, self.epsilon = groups_of(members), train.betas, train.epsilon
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self.places: dict[int, Any] = {}
        """Of each group that the kernel has moved, what it knows of it."""

    @torch.no_grad()
    def step(self, lr: float, scale: Tensor, skipped: Tensor, done: Tensor) -> None:
        """One update by gradients over `scale`, after `done` others; none where `skipped` is 1: read on the device, nothing waits."""
        if not self.groups:
            return
        kernel = kernels("textmill.kernels.adam_triton") if done.is_cuda else None
        corrections = self._corrections(done) if kernel is not None else None
        for number, group in enumerate(self.groups):
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            states, rates = (
                [self._state_of(parameter) for parameter in moved],
                (lr * group["rate"], group["weight_decay"]),
            )
            first, second = ([state[name] for state in states] for name in MOMENTS.values())
            gradients = [parameter.grad for parameter in moved if parameter.grad is not None]
            tensors = moved, gradients, first, second
            if kernel is not None and moved and kernel.fit(tensors):
                places = self.places.setdefault(number, kernel.Places())
                places.move(
                    tensors, scale, skipped, corrections, (*rates, *(1 - beta for beta in self.betas), self.epsilon)
                )
            else:
                self._by_torch(tensors, rates, scale, skipped, done)

    def _corrections(self, done: Tensor) -> Tensor:
        """1 - beta^steps for the next update's first moment, and the root of it for the second."""
        first, second = (1 - beta ** (done.double() + 1) for beta in self.betas)
        return torch.stack([first, second.sqrt()]).float()

    def _by_torch(
        self, tensors: tuple[Any, ...], rates: tuple[float, float], scale: Tensor, skipped: Tensor, done: Tensor
    ) -> None:
        moved, gradients, first, second = tensors
        steps = list(done.float().repeat(len(moved)).unbind())  # torch counts on in each, so they are one each
        adamw(
            moved, gradients, first, second, [], steps, fused=True, grad_scale=scale, found_inf=skipped,
            amsgrad=False, maximize=False, eps=self.epsilon, beta1=self.betas[0], beta2=self.betas[1], lr=rates[0], weight_decay=rates[1],
        )  # fmt: skip

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        if parameter not in self.state:
            self.state[parameter] = {
                name: torch.zeros_like(parameter, memory_format=torch.contiguous_format) for name in MOMENTS.values()
            }
        return self.state[parameter]

    def take(self, kind: str, parameter: nn.Parameter, values: Tensor) -> None:
        """Go on with a parameter's moment of one kind."""
        moment = values.to(parameter.device, copy=True, memory_format=torch.contiguous_format)
        self.state.setdefault(parameter, {})[MOMENTS[kind]] = moment
