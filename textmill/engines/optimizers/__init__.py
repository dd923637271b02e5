"""The optimizer step in torch. `train.optimizer: NAME` is NAME_torch.py in this folder, and nothing else names it.

A file NAME_torch.py has

    STATE             the names of its state, one tensor of a weight's shape each, as checkpoints have them: momentum
    takes             whether it updates a weight; AdamW updates the others
    adamw_rate        the learning rate of these others, as a factor of `train.learning_rate`
    state_bytes       bytes of the state of its weights on this rank
    new_optimizer     builds a `WeightsOptimizer` for its weights

`AdamW` below has the same names. `Optimizer.step` makes the gradients equal on tensor-parallel ranks, computes their
norm over all ranks, clips, and calls the step of each. Parameter groups (weight decay, learning-rate factors, frozen
weights) come from models/parameter_groups.py. The JAX engine has its own in step_jax.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from textmill.config import TrainConfig
from textmill.config.own_files import is_own_file, last_own_file
from textmill.engines.meshes import Mesh
from textmill.engines.parallel_torch import Parallel
from textmill.errors import TextmillError
from textmill.models import Weight
from textmill.models.base_torch import BaseNet
from textmill.models.nets_torch import parameters_of
from textmill.models.parameter_groups import Rule, rules_of

ADAMW = "adamw"
"""The optimizer of all weights that `train.optimizer` does not take."""
TORCH_NAMES = {"m": "exp_avg", "v": "exp_avg_sq"}
"""Torch's names of AdamW's first and second moment."""
MOST_UNCHANGED = 3
"""Updates of the user's own optimizer that may change no weight; SOAP's first one does not."""


class Member(NamedTuple):
    """A trained weight, its torch parameter, and its weight decay and learning rate."""

    weight: Weight
    parameter: nn.Parameter
    rule: Rule


class WeightsOptimizer(Protocol):
    """The update of some weights and their state."""

    def step(self, lr: float | Tensor, gradient_factor: Tensor, updated: Tensor, done: Tensor) -> None:
        """One update with gradients x `gradient_factor`, after `done` updates; none if `updated` is false. All three
        are read on the device, and `lr` if it is a tensor."""
        ...

    def state(self) -> dict[str, dict[nn.Parameter, Tensor]]:
        """The state by its names and by the parameter of each member, after the first update."""
        ...

    def load_state(self, name: str, parameter: nn.Parameter, values: Tensor) -> None:
        """Set the state of a member's parameter; `values` is this rank's part."""
        ...


def open_optimizer(name: str) -> Any:
    """`AdamW`, the module NAME_torch.py, or the user's own file."""
    if name == ADAMW:
        return AdamW
    if is_own_file(name):
        return OwnOptimizer(last_own_file(name, "train.optimizer", "update").module)
    return import_module(f"textmill.engines.optimizers.{name}_torch")


def optimizer_of(weight: Weight, train: TrainConfig) -> str:
    """The name of the optimizer that updates a weight."""
    return train.optimizer if open_optimizer(train.optimizer).takes(weight) else ADAMW


def check_optimizer_mesh(train: TrainConfig, mesh: Mesh) -> None:
    """Refuse a mesh on which an optimizer of the user's own would see a part of a weight instead of all of it."""
    if not is_own_file(train.optimizer) or mesh.shard == mesh.tensor == 1:
        return
    if not getattr(last_own_file(train.optimizer, "train.optimizer", "update").module, "ELEMENTWISE", False):
        key = "shard" if mesh.shard > 1 else "tensor"
        raise TextmillError(
            f"train.optimizer: with engine.mesh.{key} a process has a part of each weight, and {train.optimizer} does "
            "not say that its update works on each number alone; if it does, write ELEMENTWISE = True in the file, "
            "else use engine.mesh.replicate"
        )


def state_names(weight: Weight, train: TrainConfig) -> tuple[str, ...]:
    """The names of the tensors of a weight's optimizer state."""
    names: tuple[str, ...] = open_optimizer(optimizer_of(weight, train)).STATE
    return names


def state_sizes(weight: Weight, train: TrainConfig) -> list[int]:
    """The numbers in each tensor of a weight's optimizer state, as a checkpoint has them."""
    optimizer = open_optimizer(optimizer_of(weight, train))
    if isinstance(optimizer, OwnOptimizer):
        state = optimizer.new_state(torch.empty(weight.memory_shape, device="meta"))
        return [weight.size if name in optimizer.STATE else tensor.numel() for name, tensor in state.items()]
    return [weight.size] * len(optimizer.STATE)


class AdamW:
    """AdamW by torch's fused kernel, with gradients that are scaled and updates that are skipped on the device.

    It is not torch.optim.AdamW, whose import of the compiler takes a third of the start-up time.
    """

    STATE = tuple(TORCH_NAMES)

    @staticmethod
    def takes(weight: Weight) -> bool:
        """AdamW updates any weight."""
        return True

    @staticmethod
    def adamw_rate(train: TrainConfig) -> float:
        """It is AdamW itself."""
        return 1.0

    @staticmethod
    def state_bytes(members: list[Member], parallel: Parallel) -> int:
        """Two moments of this rank's parts."""
        return 2 * sum(parallel.local(parameter).nbytes for _, parameter, _ in members)

    @classmethod
    def new_optimizer(cls, members: list[Member], train: TrainConfig, *_: Any, compiled: bool) -> AdamW:
        """AdamW needs no more than this rank's parts."""
        return cls(members, train)

    def __init__(self, members: list[Member], train: TrainConfig) -> None:
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
                name: torch.zeros_like(parameter, memory_format=torch.contiguous_format) for name in self.STATE
            }
        return self.moments[parameter]

    def state(self) -> dict[str, dict[nn.Parameter, Tensor]]:
        """The moments of each parameter."""
        return {name: {parameter: moments[name] for parameter, moments in self.moments.items()} for name in self.STATE}

    def load_state(self, name: str, parameter: nn.Parameter, values: Tensor) -> None:
        """Set a parameter's moment."""
        moment = values.to(parameter.device, copy=True, memory_format=torch.contiguous_format)
        self.moments.setdefault(parameter, {})[name] = moment


def groups_of(members: Iterable[Member]) -> list[dict[str, Any]]:
    """Parameter groups by learning-rate factor (`rate`) and weight decay."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for _, parameter, rule in members:
        groups.setdefault((rule.rate, rule.decay), []).append(parameter)
    return [{"params": groups[key], "weight_decay": key[1], "rate": key[0]} for key in sorted(groups, reverse=True)]


class OwnOptimizer:
    """What a file NAME_torch.py has, made from the user's own file: `update`, STATE or `new_state`, and `takes`.

    `update(parameter, gradient, state, lr, decay)` changes a parameter in place; with `engine.mesh.shard` a parameter
    is this rank's part. `state` may be changed in place, or get new tensors. A skipped update is decided on the host,
    which waits for the device."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.STATE: tuple[str, ...] = tuple(getattr(module, "STATE", ()))
        self.takes = getattr(module, "takes", lambda weight: True)
        self.unchanged: int | None = 0
        """Updates so far that changed no weight; None: one did."""

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of a parameter before its first update: zeros like it, and those of the file's `new_state`, which
        may have any shape."""
        state = {name: torch.zeros_like(parameter) for name in self.STATE}
        if not hasattr(self.module, "new_state"):
            return state
        with torch.device(parameter.device), torch.no_grad():
            own = self.module.new_state(parameter)
        for name, tensor in own.items():
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
                found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise TextmillError(
                    f"train.optimizer: new_state returns {found} as '{name}'; give tensors of torch.float32, since a "
                    "checkpoint has no others"
                )
            state[name] = tensor
        return state

    def adamw_rate(self, train: TrainConfig) -> float:
        """AdamW's rate for the weights that `takes` leaves to it."""
        return train.muon.adamw_rate_factor

    def state_bytes(self, members: list[Member], parallel: Parallel) -> int:
        """The tensors of the state for this rank's parts."""
        parts = [torch.empty(parallel.local(member.parameter).shape, device="meta") for member in members]
        return sum(tensor.nbytes for part in parts for tensor in self.new_state(part).values())

    def new_optimizer(self, members: list[Member], *_: Any, compiled: bool) -> OwnOptimizer:
        """For these weights."""
        self.members = members
        self.states = {member.parameter: self.new_state(member.parameter.detach()) for member in members}
        return self

    def is_like_weight(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether a parameter's state of this name has its shape."""
        return name in self.STATE or name not in self.states[parameter]

    @torch.no_grad()
    def step(self, lr: float | Tensor, gradient_factor: Tensor, updated: Tensor, done: Tensor) -> None:
        """One update of every weight."""
        assert not isinstance(lr, Tensor)
        if not updated:
            return
        changes = self.unchanged is None or not lr
        for _, parameter, rule in self.members:
            if parameter.grad is None:
                continue
            before = None if changes else parameter.clone()
            gradient = parameter.grad * gradient_factor
            self.module.update(parameter, gradient, self.states[parameter], lr * rule.rate, rule.decay)
            changes = changes or before is None or not torch.equal(before, parameter) or not gradient.any()
        if self.unchanged is not None and lr:
            self.unchanged = None if changes else self.unchanged + 1
        if self.unchanged == MOST_UNCHANGED:
            raise TextmillError(
                f"train.optimizer: {MOST_UNCHANGED} updates by {self.module.__file__} changed no weight; change it in "
                "place, such as parameter.add_(direction, alpha=-lr)"
            )

    def state(self) -> dict[str, dict[nn.Parameter, Tensor]]:
        """The state by its names."""
        named: dict[str, dict[nn.Parameter, Tensor]] = {}
        for parameter, state in self.states.items():
            for name, tensor in state.items():
                named.setdefault(name, {})[parameter] = tensor
        return named

    def load_state(self, name: str, parameter: nn.Parameter, values: Tensor) -> None:
        """Set the state of a parameter."""
        self.states[parameter][name].copy_(values)


class Optimizer:
    """The optimizers of a net and their state; a non-finite gradient skips the update, decided on the device."""

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
        """By name: that of `train.optimizer`, then AdamW for the weights that it does not take."""
        self.adamw_rate = open_optimizer(train.optimizer).adamw_rate(train) if len(self.optimizers) > 1 else 1.0
        self.absent = absent_of(net, train)
        """The trained weights that only other pipeline stages have, with their parameters on the meta device."""
        self.trained = sum(math.prod(weight.shape) for weight, _ in [*self.weights, *self.absent])
        """The number of trained parameters."""
        self.done = torch.zeros((), dtype=torch.int64, device=self.parameters[0].device)
        """Updates done, without skipped ones."""

    def step(self, lr: float | Tensor, loss_scale: Tensor | None = None, *, keep_gradients: bool = False) -> Tensor:
        """One update; returns the gradient norm before clipping.

        In fp16 the gradients are those of the loss times `loss_scale`. They are set to None afterwards, or with
        `keep_gradients` to zero.
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
        updated = torch.isfinite(norm)
        clip = (self.train.clip / (norm + 1e-6)).clamp_max(1.0) if self.train.clip else torch.ones_like(norm)
        gradient_factor = clip if loss_scale is None else clip / loss_scale
        for name, optimizer in self.optimizers.items():
            optimizer.step(lr * self.adamw_rate if name == ADAMW else lr, gradient_factor, updated, self.done)
        self.done += updated
        if keep_gradients:
            torch._foreach_zero_([gradient for _, gradient in gradients])
            return norm
        for parameter, local_part in self.local_parts.items():
            parameter.grad = local_part.grad = None
        return norm

    def count(self) -> int:
        """Updates done, without skipped ones."""
        return int(self.done)

    def state_sizes(self) -> list[int]:
        """The numbers in each tensor of optimizer state after the first update: AdamW has two for each weight."""
        return [size for weight, _ in self.weights for size in state_sizes(weight, self.train)]

    def is_like_weight(self, name: str, weight: Weight, parameter: nn.Parameter) -> bool:
        """Whether a parameter's state of this name has the shape of the weight, and is stored as it is."""
        optimizer = self.optimizers.get(optimizer_of(weight, self.train))
        return not isinstance(optimizer, OwnOptimizer) or optimizer.is_like_weight(name, self.local_parts[parameter])

    def states(self) -> Iterator[tuple[str, dict[nn.Parameter, Tensor]]]:
        """The optimizer state by name, of each parameter of the net; none before the first update.

        Weights of other pipeline stages are there, without values."""
        if not self.count():
            return
        # A checkpoint has AdamW's state first.
        for _, optimizer in sorted(self.optimizers.items(), key=lambda item: item[0] != ADAMW):
            for name, state in optimizer.state().items():
                yield (
                    name,
                    {self.full_parameters[part]: values for part, values in state.items()}
                    | {other: other for weight, other in self.absent if name in state_names(weight, self.train)},
                )

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
        if rules[name].trained and weight.parameter not in net.absent:
            members.append(Member(weight, parameter, rules[name]))
    return members


def absent_of(net: BaseNet, train: TrainConfig) -> list[tuple[Weight, nn.Parameter]]:
    """The trained weights that this process does not have, since another pipeline stage has them."""
    if not net.absent:
        return []
    rules = rules_of(net.shape, train, net.lora)
    members = parameters_of(net).items()
    return [member for name, member in members if rules[name].trained and member[0].parameter in net.absent]
