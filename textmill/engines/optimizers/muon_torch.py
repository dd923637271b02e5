"""Muon: momentum made orthogonal by Newton-Schulz, all matrices of one shape at a time. B matrices of R rows and C columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from textmill.engines.shared_torch import kernels
from textmill.models import Weight
from textmill.models.parameter_groups import Rule

if TYPE_CHECKING:
    from textmill.engines.optimizers.muon_triton import FusedStack

TURNS = ((3.4445, -4.7750, 2.0315),) * 5
"""The quintic's coefficients in each of the five turns of Newton-Schulz."""
LIKE_ADAM = 0.2
"""An orthogonal step times this and the root of its longer side is about as long as one of AdamW, so that rates carry over."""
TINY = 1e-7

Member = tuple[Weight, nn.Parameter, Rule]


class Muon:
    """The update of block matrices. Queries, keys and values are three matrices; tall ones lie on their side."""

    def __init__(self, members: list[Member], heads: int, momentum: float, *, compiled: bool) -> None:
        groups: dict[tuple[int, int], list[Member]] = {}
        for weight, parameter, rule in members:
            groups.setdefault(_shape(weight, parameter, heads), []).append((weight, parameter, rule))
        self.stacks = {
            shape: _stack(group, heads, shape, momentum, compiled=compiled) for shape, group in groups.items()
        }

    @torch.no_grad()
    def step(self, lr: float, clip: Tensor, finite: Tensor) -> None:
        """One update with gradients times `clip`; where `finite` is false nothing changes, and nothing waits to know."""
        for (_, columns), stack in self.stacks.items():
            steps = turned(stack.gather(clip, finite))
            stack.apply(steps, lr, lr * LIKE_ADAM * math.sqrt(columns), finite)

    def momentum(self) -> dict[nn.Parameter, Tensor]:
        """The momentum of each parameter, in its own layout."""
        return {parameter: values for stack in self.stacks.values() for parameter, values in stack.momentum().items()}

    def take(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Go on with this momentum of a parameter."""
        for stack in self.stacks.values():
            stack.take(parameter, values)


class Stack:
    """Parameters whose matrices have one shape: what an update does to them before and after their steps are made orthogonal."""

    def __init__(self, members: list[Member], heads: int, momentum: float, *, compiled: bool) -> None:
        self.members, self.heads, self.kept = members, heads, momentum
        self.parameters = [parameter for _, parameter, _ in members]
        self.blend: Callable[..., Tensor] = torch.compile(_blend, dynamic=False) if compiled else _blend
        self.momenta = self._stacked([torch.zeros_like(parameter) for parameter in self.parameters])
        self.decays: dict[float, list[Tensor]] = {}
        for _, parameter, rule in members:
            self.decays.setdefault(rule.rate * rule.decay, []).append(parameter)
        self.counts = [_count(weight) for weight, _, _ in members]
        rates = [rule.rate for weight, _, rule in members for _ in range(_count(weight))]
        self.rates = torch.tensor(rates, device=self.momenta.device)[:, None, None]
        """The rate of each matrix, as a multiple of the step's."""
        # A CPU without bf16 would take minutes where its own precision takes seconds.
        self.precision = torch.bfloat16 if self.momenta.is_cuda else torch.float32

    def gather(self, clip: Tensor, finite: Tensor) -> Tensor:
        """Move the momenta on by the gradients; return Nesterov's look ahead, each matrix divided by its norm."""
        grads = self._stacked([parameter.grad for parameter in self.parameters])  # type: ignore[misc]
        return normed(self.blend(self.momenta, grads, self.kept, clip, finite, self.precision))

    def apply(self, steps: Tensor, lr: float, rate: float, finite: Tensor) -> None:
        """Decay the weights by `lr` and move them by their steps times `rate`, after `gather`."""
        for decay, parameters in self.decays.items():
            torch._foreach_mul_(parameters, torch.where(finite, 1 - lr * decay, 1.0))
        moved = self._apart(steps.float() * (torch.where(finite, rate, 0.0) * self.rates))
        torch._foreach_sub_([*self.parameters], moved)

    def momentum(self) -> dict[nn.Parameter, Tensor]:
        """The momentum of each parameter, in its own layout."""
        return dict(zip(self.parameters, self._apart(self.momenta), strict=True))

    def take(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Go on with this momentum, if the parameter is of this stack."""
        for (weight, member, _), part in zip(self.members, self.momenta.split_with_sizes(self.counts), strict=True):
            if member is parameter:
                part.copy_(_matrices(weight, values, self.heads))

    def _stacked(self, values: list[Tensor]) -> Tensor:
        return torch.cat(
            [_matrices(weight, one, self.heads) for (weight, _, _), one in zip(self.members, values, strict=True)]
        )

    def _apart(self, stacked: Tensor) -> list[Tensor]:
        """A stack as values of each of its parameters."""
        parts = zip(self.members, stacked.split_with_sizes(self.counts), strict=True)
        return [_values(weight, parameter, part, self.heads) for (weight, parameter, _), part in parts]


def _stack(
    members: list[Member], heads: int, shape: tuple[int, int], momentum: float, *, compiled: bool
) -> Stack | FusedStack:
    fused = (
        kernels("textmill.engines.optimizers.muon_triton")
        if all(parameter.is_cuda for _, parameter, _ in members)
        else None
    )
    if fused is not None and all(fused.fits(parameter) for _, parameter, _ in members):
        made: FusedStack = fused.FusedStack(members, heads, shape, momentum, TINY)
        return made
    return Stack(members, heads, momentum, compiled=compiled)


def _shape(weight: Weight, parameter: Tensor, heads: int) -> tuple[int, int]:
    """Rows and columns of a parameter's matrices."""
    _, rows, columns = _matrices(weight, parameter.detach(), heads).shape
    return rows, columns


def _matrices(weight: Weight, values: Tensor, heads: int) -> Tensor:
    """A parameter's values as [1 or 3, R, C] with R <= C."""
    columns = values.shape[1]
    parts = (
        values.view(heads, 3, -1, columns).transpose(0, 1).reshape(3, -1, columns)
        if weight.layout == "qkv"
        else values[None]
    )
    return parts.mT if parts.shape[1] > columns else parts


def _values(weight: Weight, parameter: Tensor, parts: Tensor, heads: int) -> Tensor:
    """The way back of `_matrices`."""
    columns = parameter.shape[1]
    parts = parts if parts.shape[2] == columns else parts.mT
    if weight.layout == "qkv":
        return parts.reshape(3, heads, -1, columns).transpose(0, 1).reshape(parameter.shape)
    return parts[0]


def _count(weight: Weight) -> int:
    """How many matrices a weight is."""
    return 3 if weight.layout == "qkv" else 1


def _blend(momenta: Tensor, grads: Tensor, kept: float, clip: Tensor, finite: Tensor, precision: torch.dtype) -> Tensor:
    """Move the momenta on in place; return Nesterov's look ahead in the precision asked."""
    grads = torch.where(finite, grads * clip, 0.0)
    momenta.copy_(torch.where(finite, momenta.lerp(grads, 1 - kept), momenta))
    return grads.lerp(momenta, kept).to(precision)


def normed(x_BRC: Tensor) -> Tensor:
    """Each matrix divided by its norm."""
    norms_B11: Tensor = x_BRC.norm(dim=(1, 2), keepdim=True)
    return x_BRC / norms_B11.clamp_min(TINY)


def turned(x: Tensor) -> Tensor:
    """Each matrix [B, R, C] of norm 1 with its singular values driven towards 1, in the precision given."""
    for linear, cubic, quintic in TURNS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic), x, beta=linear)
    return x
