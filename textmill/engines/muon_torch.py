"""Muon: momentum made orthogonal by Newton-Schulz, all matrices of one shape at a time. B matrices of R rows and C columns."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from textmill.models import Weight
from textmill.models.rules import Rule

MOMENTUM = 0.95
TURNS = ((3.4445, -4.7750, 2.0315),) * 5
"""The quintic's coefficients in each of the five turns of Newton-Schulz."""
LIKE_ADAM = 0.2
"""An orthogonal step times this and the root of its longer side is about as long as one of AdamW, so that rates carry over."""
TINY = 1e-7

Member = tuple[Weight, nn.Parameter, Rule]


class Muon:
    """The update of block matrices. Queries, keys and values are three matrices; tall ones lie on their side."""

    def __init__(self, members: list[Member], heads: int, *, compiled: bool) -> None:
        self.heads = heads
        self.blend: Callable[..., Tensor] = torch.compile(_blend, dynamic=False) if compiled else _blend
        self.groups: dict[tuple[int, ...], list[Member]] = {}
        self.decays: dict[float, list[Tensor]] = {}
        for weight, parameter, rule in members:
            self.groups.setdefault(tuple(self._matrices(weight, parameter.detach()).shape[1:]), []).append((weight, parameter, rule))
            self.decays.setdefault(rule.rate * rule.decay, []).append(parameter)
        self.momenta = {shape: self._stacked(shape, torch.zeros_like) for shape in self.groups}
        self.rates = {shape: self._rates(shape) for shape in self.groups}
        # A CPU without bf16 would take minutes where its own precision takes seconds.
        self.precision = torch.bfloat16 if any(parameter.is_cuda for _, parameter, _ in members) else torch.float32

    def _stacked(self, shape: tuple[int, ...], of: Callable[[nn.Parameter], Tensor]) -> Tensor:
        return torch.cat([self._matrices(weight, of(parameter)) for weight, parameter, _ in self.groups[shape]])

    def _rates(self, shape: tuple[int, ...]) -> Tensor:
        """The rate of each matrix of a stack, as a multiple of the step's."""
        rates = [rule.rate for weight, _, rule in self.groups[shape] for _ in range(_count(weight))]
        return torch.tensor(rates, device=self.momenta[shape].device)[:, None, None]

    def _matrices(self, weight: Weight, values: Tensor) -> Tensor:
        """A parameter's values as [1 or 3, R, C] with R <= C."""
        columns = values.shape[1]
        parts = values.view(self.heads, 3, -1, columns).transpose(0, 1).reshape(3, -1, columns) if weight.layout == "qkv" else values[None]
        return parts.mT if parts.shape[1] > columns else parts

    def _values(self, weight: Weight, parameter: Tensor, parts: Tensor) -> Tensor:
        """The way back of `_matrices`."""
        columns = parameter.shape[1]
        parts = parts if parts.shape[2] == columns else parts.mT
        if weight.layout == "qkv":
            return parts.reshape(3, self.heads, -1, columns).transpose(0, 1).reshape(parameter.shape)
        return parts[0]

    def _apart(self, shape: tuple[int, ...], stacked: Tensor) -> list[Tensor]:
        """A stack as values of each of its parameters."""
        members = self.groups[shape]
        parts = torch.split_with_sizes(stacked, [_count(weight) for weight, _, _ in members])
        return [self._values(weight, parameter, part) for (weight, parameter, _), part in zip(members, parts, strict=True)]

    @torch.no_grad()
    def step(self, lr: float, clip: Tensor, finite: Tensor) -> None:
        """One update with gradients times `clip`; where `finite` is false nothing changes, and nothing waits to know."""
        for decay, parameters in self.decays.items():
            torch._foreach_mul_(parameters, torch.where(finite, 1 - lr * decay, 1.0))
        for shape, members in self.groups.items():
            grads = self._stacked(shape, lambda parameter: parameter.grad)  # type: ignore[arg-type, return-value]
            steps = orthogonalised(self.blend(self.momenta[shape], grads, clip, finite, self.precision))
            rate = torch.where(finite, lr * LIKE_ADAM * math.sqrt(shape[1]), 0.0)
            moved = self._apart(shape, steps.float() * (rate * self.rates[shape]))
            torch._foreach_sub_([parameter for _, parameter, _ in members], moved)

    def momentum(self) -> dict[nn.Parameter, Tensor]:
        """The momentum of each parameter, in its own layout."""
        found: dict[nn.Parameter, Tensor] = {}
        for shape, members in self.groups.items():
            for (_, parameter, _), values in zip(members, self._apart(shape, self.momenta[shape]), strict=True):
                found[parameter] = values
        return found

    def take(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Go on with this momentum of a parameter."""
        for shape, members in self.groups.items():
            parts = torch.split_with_sizes(self.momenta[shape], [_count(weight) for weight, _, _ in members])
            for (weight, member, _), part in zip(members, parts, strict=True):
                if member is parameter:
                    part.copy_(self._matrices(weight, values))


def _count(weight: Weight) -> int:
    """How many matrices a weight is."""
    return 3 if weight.layout == "qkv" else 1


def _blend(momenta: Tensor, grads: Tensor, clip: Tensor, finite: Tensor, precision: torch.dtype) -> Tensor:
    """Move the momenta on in place; return Nesterov's look ahead in the precision asked."""
    grads = torch.where(finite, grads * clip, 0.0)
    momenta.copy_(torch.where(finite, momenta.lerp(grads, 1 - MOMENTUM), momenta))
    return grads.lerp(momenta, MOMENTUM).to(precision)


def orthogonalised(x_BRC: Tensor) -> Tensor:
    """Each matrix with its singular values driven towards 1, in the precision given."""
    x: Tensor = x_BRC / x_BRC.norm(dim=(1, 2), keepdim=True).clamp_min(TINY)
    for linear, cubic, quintic in TURNS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic), x, beta=linear)
    return x
