"""The optimizer step in torch. `train.optimizer: NAME` is NAME_torch.py in this folder, and nothing else names it.

Such a file has

    STATE             the names of its state, one tensor of a weight's shape each, as checkpoints have them: momentum
    takes             whether it updates a weight; AdamW updates those that it does not take
    adamw_rate        AdamW's learning rate for these, as a factor of `train.learning_rate`
    state_bytes       bytes of the state of its weights on this rank
    new_optimizer     builds a `WeightsOptimizer` for its weights

`Optimizer.step` makes the gradients equal on tensor-parallel ranks, computes their norm over all ranks, clips, and
calls the step of each. Parameter groups (weight decay, learning-rate factors, frozen weights) come from
models/parameter_groups.py. The JAX engine has its own in step_jax.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from textmill.config import TrainConfig
from textmill.config.own_files import is_own_file, last_own_file
from textmill.engines.parallel_torch import Parallel
from textmill.models import Weight
from textmill.models.base_torch import BaseNet
from textmill.models.nets_torch import parameters_of
from textmill.models.parameter_groups import Rule, rules_of

ADAMW = "adamw"
"""The optimizer of all weights that `train.optimizer` does not take."""


class Member(NamedTuple):
    """A trained weight, its torch parameter, and its weight decay and learning rate."""

    weight: Weight
    parameter: nn.Parameter
    rule: Rule


class WeightsOptimizer(Protocol):
    """The update of some weights and their state."""

    def step(self, lr: float, gradient_factor: Tensor, updated: Tensor, done: Tensor) -> None:
        """One update with gradients x `gradient_factor`, after `done` updates; none if `updated` is false. All three
        are read on the device."""
        ...

    def state(self) -> dict[str, dict[nn.Parameter, Tensor]]:
        """The state by its names and by the parameter of each member, after the first update."""
        ...

    def load_state(self, name: str, parameter: nn.Parameter, values: Tensor) -> None:
        """Set the state of a member's parameter; `values` is this rank's part."""
        ...


def open_optimizer(name: str) -> Any:
    """The module NAME_torch.py, or the user's own file."""
    if is_own_file(name):
        return OwnOptimizer(last_own_file(name, "train.optimizer", "update").module)
    return import_module(f"textmill.engines.optimizers.{name}_torch")


def optimizer_of(weight: Weight, train: TrainConfig) -> str:
    """The name of the optimizer that updates a weight."""
    return train.optimizer if open_optimizer(train.optimizer).takes(weight) else ADAMW


def state_names(weight: Weight, train: TrainConfig) -> tuple[str, ...]:
    """The names of the tensors of a weight's optimizer state."""
    names: tuple[str, ...] = open_optimizer(optimizer_of(weight, train)).STATE
    return names


class OwnOptimizer:
    """The functions of such a file, made from those of the user's own: `update`, STATE and optionally `takes`.

    `update(parameter, gradient, state, lr, decay)` changes a parameter in place; with `engine.mesh.shard` a parameter
    is this rank's part. A skipped update is decided on the host, which waits for the device."""

    def __init__(self, module: Any) -> None:
        self.update = module.update
        self.STATE: tuple[str, ...] = tuple(getattr(module, "STATE", ()))
        self.takes = getattr(module, "takes", lambda weight: True)

    def adamw_rate(self, train: TrainConfig) -> float:
        """AdamW's rate for the weights that `takes` leaves to it."""
        return train.muon.adamw_rate_factor

    def state_bytes(self, members: list[Member], parallel: Parallel) -> int:
        """A tensor of each name for this rank's parts."""
        return len(self.STATE) * sum(parallel.local(member.parameter).nbytes for member in members)

    def new_optimizer(self, members: list[Member], *_: Any, compiled: bool) -> OwnOptimizer:
        """For these weights."""
        self.members = members
        self.tensors = {
            name: {member.parameter: torch.zeros_like(member.parameter) for member in members} for name in self.STATE
        }
        return self

    @torch.no_grad()
    def step(self, lr: float, gradient_factor: Tensor, updated: Tensor, done: Tensor) -> None:
        """One update of every weight."""
        if not updated:
            return
        for _, parameter, rule in self.members:
            if parameter.grad is not None:
                state = {name: tensors[parameter] for name, tensors in self.tensors.items()}
                self.update(parameter, parameter.grad * gradient_factor, state, lr * rule.rate, rule.decay)

    def state(self) -> dict[str, dict[nn.Parameter, Tensor]]:
        """The state by its names."""
        return self.tensors

    def load_state(self, name: str, parameter: nn.Parameter, values: Tensor) -> None:
        """Set the state of a parameter."""
        self.tensors[name][parameter].copy_(values)


class Optimizer:
    """The optimizers of a net and their state; a non-finite gradient or a spike skips the update, decided on the
    device."""

    def __init__(self, net: BaseNet, train: TrainConfig, parallel: Parallel, *, compiled: bool = False) -> None:
        self.train = train
        self.parallel = parallel
        self.local_parts: dict[nn.Parameter, nn.Parameter] = {}
        """This rank's part of each trained parameter of the net: the parameter itself unless FSDP shards it."""
        self.weights: list[tuple[Weight, nn.Parameter]] = []
        """The trained weights and this rank's parts of them."""
        members: dict[str, list[Member]] = {}
        for weight, parameter, rule in trained_of(net, train):
            part = nn.Parameter(parallel.local(parameter)) if parallel.sharded else parameter
            self.local_parts[parameter] = part
            self.weights.append((weight, part))
            members.setdefault(optimizer_of(weight, train), []).append(Member(weight, part, rule))
        self.parameters = list(self.local_parts)
        self.full_parameters = {part: parameter for parameter, part in self.local_parts.items()}
        """The net's parameter of each part."""
        self.optimizers: dict[str, WeightsOptimizer] = {
            name: open_optimizer(name).new_optimizer(group, train, parallel, self.full_parameters, compiled=compiled)
            for name, group in sorted(members.items(), key=lambda item: item[0] == ADAMW)
        }
        """That of `train.optimizer`, then AdamW's."""
        self.adamw_rate = open_optimizer(train.optimizer).adamw_rate(train) if len(self.optimizers) > 1 else 1.0
        self.trained = sum(math.prod(weight.shape) for weight, _ in self.weights)
        """The number of trained parameters."""
        self.done = torch.zeros((), dtype=torch.int64, device=self.parameters[0].device)
        """Updates done, without skipped ones."""

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
        for name, optimizer in self.optimizers.items():
            optimizer.step(lr * self.adamw_rate if name == ADAMW else lr, gradient_factor, updated, self.done)
        self.done += updated
        for parameter, local_part in self.local_parts.items():
            parameter.grad = local_part.grad = None
        return norm

    def count(self) -> int:
        """Updates done, without skipped ones."""
        return int(self.done)

    def state_weights(self) -> list[Weight]:
        """The weight of each tensor of optimizer state after the first update: AdamW has two for each weight."""
        return [weight for weight, _ in self.weights for _ in state_names(weight, self.train)]

    def states(self) -> Iterator[tuple[str, dict[nn.Parameter, Tensor]]]:
        """The optimizer state by name, of each parameter of the net; none before the first update."""
        if not self.count():
            return
        # A checkpoint has AdamW's state first.
        for _, optimizer in sorted(self.optimizers.items(), key=lambda item: item[0] != ADAMW):
            for name, state in optimizer.state().items():
                yield name, {self.full_parameters[part]: values for part, values in state.items()}

    def load_state(self, name: str, weight: Weight, parameter: nn.Parameter, values: Tensor, count: int) -> None:
        """Set a parameter's state of one name after `count` updates; `values` is this rank's part."""
        self.done.fill_(count)
        self.optimizers[optimizer_of(weight, self.train)].load_state(name, self.local_parts[parameter], values)


def trained_of(net: BaseNet, train: TrainConfig) -> list[Member]:
    """The trained weights of a net with their parameters and rules; freezes all others."""
    rules = rules_of(net.shape, train, net.lora)
    members = []
    for name, (weight, parameter) in parameters_of(net).items():
        parameter.requires_grad_(rules[name].trained)
        if rules[name].trained:
            members.append(Member(weight, parameter, rules[name]))
    return members
