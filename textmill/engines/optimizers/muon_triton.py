"""Muon on a GPU with three Triton kernels: gather gradients into a stack, divide by norms, apply steps to weights.

B matrices of R rows and C columns, R <= C. A program handles a square tile of one matrix and reads and writes its rows
in the parameter's layout; tall matrices are transposed inside the tile. A momentum has its parameter's layout.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from textmill.kernels.pointers_triton import can_update_in_place, load_pointer
from textmill.kernels.require_triton import tl, triton
from textmill.kernels.transfer_torch import copy_to_device
from textmill.models import Weight
from textmill.models.parameter_groups import Rule

SIDE, WARPS = 64, 8
"""Rows and columns of a tile, and warps per tile."""
BLOCK = 4096
"""Elements per program of `_divide`."""


@triton.jit  # type: ignore[untyped-decorator]
def _tile(places, matrix, R, C, S: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's tile: its rows and columns in the parameter's layout, and their offsets in the parameter."""
    tile, across = tl.program_id(0), tl.cdiv(C, S)
    entry = places + matrix * 5
    tall, D, gap, start, first = (
        tl.load(entry) != 0,
        tl.load(entry + 1),
        tl.load(entry + 2),
        tl.load(entry + 3),
        tl.load(entry + 4),
    )
    high, wide = tl.where(tall, C, R), tl.where(tall, R, C)
    rows = tl.where(tall, tile % across, tile // across) * S + tl.arange(0, S)
    columns = tl.where(tall, tile // across, tile % across) * S + tl.arange(0, S)
    at = (start + rows + rows // D * gap)[:, None] * wide + columns[None, :]
    return tall, first, rows, columns, rows < high, columns < wide, at


@triton.jit  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    places, gradients, momenta, stack, norms, clip, finite, R, C, rate, S: tl.constexpr,
):  # fmt: skip
    """Update a tile of a momentum with weight `rate`; write Nesterov's look-ahead into the stack, and its norm."""
    matrix = tl.program_id(1).to(tl.int64)
    tall, first, rows, columns, real_rows, real_columns, at = _tile(places, matrix, R, C, S)
    inside = real_rows[:, None] & real_columns[None, :]
    updated, own = tl.load(finite), momenta + first.to(tl.int64) * R * C + at
    momentum = tl.load(own, mask=inside, other=0.0)
    gradient = tl.load(load_pointer(gradients, matrix) + at, mask=inside, other=0.0)
    gradient = tl.where(updated, gradient * tl.load(clip), 0.0)
    momentum = tl.where(updated, momentum + (gradient - momentum) * rate, momentum)
    tl.store(own, momentum, mask=inside)
    ahead = (momentum - (momentum - gradient) * rate).to(stack.dtype.element_ty)
    rounded = ahead.to(tl.float32)
    tl.store(norms + matrix * tl.num_programs(0) + tl.program_id(0), tl.sqrt(tl.sum(tl.sum(rounded * rounded, 1), 0)))
    to = stack + matrix * R * C
    if tall:
        tl.store(
            to + columns[:, None] * C + rows[None, :], tl.trans(ahead), mask=real_columns[:, None] & real_rows[None, :]
        )
    else:
        tl.store(to + rows[:, None] * C + columns[None, :], ahead, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _divide(stack, norms, size, tiny, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Divide each matrix by its norm."""
    matrix, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * N + tl.arange(0, N)
    own = stack + matrix * size + at
    values = tl.load(own, mask=at < size, other=0.0).to(tl.float32) / tl.maximum(tl.load(norms + matrix), tiny)
    tl.store(own, values.to(stack.dtype.element_ty), mask=at < size)


@triton.jit  # type: ignore[untyped-decorator]
def _apply(  # type: ignore[no-untyped-def]
    places, rules, weights, steps, finite, R, C, lr, rate, S: tl.constexpr,
):  # fmt: skip
    """Decay a tile of a weight and apply its step; both are small, so they are summed before they are subtracted."""
    matrix = tl.program_id(1).to(tl.int64)
    tall, _, rows, columns, real_rows, real_columns, at = _tile(places, matrix, R, C, S)
    inside = real_rows[:, None] & real_columns[None, :]
    own, of = load_pointer(weights, matrix) + at, steps + matrix * R * C
    weight = tl.load(own, mask=inside, other=0.0)
    if tall:
        mask = real_columns[:, None] & real_rows[None, :]
        step = tl.trans(tl.load(of + columns[:, None] * C + rows[None, :], mask=mask, other=0.0))
    else:
        step = tl.load(of + rows[:, None] * C + columns[None, :], mask=inside, other=0.0)
    decay = weight * (lr * tl.load(rules + matrix * 2 + 1))
    change = decay + step.to(tl.float32) * (rate * tl.load(rules + matrix * 2))
    tl.store(own, tl.where(tl.load(finite), weight - change, weight), mask=inside)


class FusedStack:
    """`Stack` with fused kernels, for parameters on a GPU that `can_update_in_place` accepts."""

    def __init__(
        self,
        members: list[tuple[Weight, nn.Parameter, Rule]],
        shape: tuple[int, int],
        momentum: float,
        tiny: float,
    ) -> None:
        self.shape, self.rate, self.tiny = shape, 1 - momentum, tiny
        self.parameters = [parameter for _, parameter, _ in members]
        self.counts = [parameter.numel() // math.prod(shape) for parameter in self.parameters]
        places: list[tuple[int, ...]] = []
        rules: list[tuple[float, float]] = []
        for (weight, parameter, rule), count in zip(members, self.counts, strict=True):
            places += _places(weight, parameter, len(places))
            rules += [(rule.rate, rule.rate * rule.decay)] * count
        device, self.matrices = self.parameters[0].device, len(places)
        self.places = torch.tensor(places, dtype=torch.int32, device=device)
        self.rules = torch.tensor(rules, dtype=torch.float32, device=device)
        self.flat = torch.zeros(self.matrices * math.prod(shape), device=device)
        parts = self.flat.split_with_sizes([parameter.numel() for parameter in self.parameters])
        self.momenta = {
            parameter: part.view(parameter.shape) for parameter, part in zip(self.parameters, parts, strict=True)
        }
        self.grid = triton.cdiv(shape[0], SIDE) * triton.cdiv(shape[1], SIDE), self.matrices
        self.known: tuple[int, ...] = ()
        """Addresses of weights and gradients at the last step; those of a CUDA graph do not change."""

    def gather(self, clip: Tensor, finite: Tensor) -> Tensor:
        """Update the momenta; return Nesterov's look-ahead, each matrix divided by its norm."""
        (R, C), device = self.shape, self.flat.device
        gradients = [_fitting(parameter.grad) for parameter in self.parameters]
        self._update_addresses(gradients)
        stack = torch.empty(self.matrices, R, C, dtype=torch.bfloat16, device=device)
        norms = torch.empty(self.matrices, self.grid[0], device=device)
        arguments = self.places, self.addresses[1], self.flat, stack, norms, clip, finite, R, C, self.rate
        _gather[self.grid](*arguments, S=SIDE, num_warps=WARPS)
        totals = torch.linalg.vector_norm(norms, dim=1)
        _divide[triton.cdiv(R * C, BLOCK), self.matrices](stack, totals, R * C, self.tiny, N=BLOCK, num_warps=WARPS)
        return stack

    def apply(self, steps: Tensor, lr: float, rate: float, finite: Tensor) -> None:
        """After `gather`: decay the weights by `lr` and subtract steps x `rate`."""
        # Converted to floats: an integer would compile another kernel.
        arguments = self.places, self.rules, self.addresses[0], steps, finite, *self.shape, float(lr), float(rate)
        _apply[self.grid](*arguments, S=SIDE, num_warps=WARPS)

    def read_momentum(self, found: dict[nn.Parameter, Tensor]) -> None:
        """Add the momentum of each parameter, in its own layout; not a copy."""
        found.update(self.momenta)

    def load_state(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set the momentum of a parameter, if it is in this stack."""
        if parameter in self.momenta:
            self.momenta[parameter].copy_(values)

    def _update_addresses(self, gradients: list[Tensor]) -> None:
        """Copy the addresses of weights and gradients to the device if they have changed."""
        found = tuple(tensor.data_ptr() for tensor in (*self.parameters, *gradients))
        if found != self.known:
            addresses = [address for address, count in zip(found, self.counts * 2, strict=True) for _ in range(count)]
            self.known, self.addresses = found, copy_to_device(addresses, self.flat.device, torch.int64).view(2, -1)


def _fitting(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return (
        gradient
        if can_update_in_place(gradient)
        else gradient.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    )


def _places(weight: Weight, parameter: Tensor, first: int) -> list[tuple[int, ...]]:
    """For each matrix of a parameter: whether it is tall, its rows in a group, the group's other rows, its first row,
    and the number of the parameter's first matrix."""
    rows, columns = parameter.shape
    group = rows // weight.groups
    parts = [(part.stop - part.start, part.start) for part in weight.part_rows]
    return [(count * weight.groups > columns, count, group - count, start, first) for count, start in parts]
