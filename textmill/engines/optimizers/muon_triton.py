"""Muon on a GPU with three Triton kernels: gather gradients into a stack, divide by norms, apply steps to weights.

A stack is B matrices of R rows and C columns, R <= C; a tall matrix is stacked as its transpose. Weights, gradients and
momenta stay in the layout of the parameter, of which a matrix is only some rows. A parameter [12, 4] of 2 heads:

    row of the parameter   0  1   2  3   4  5   6  7   8  9  10 11
                           q      k      v      q      k      v      `groups=2`, a head each

The keys are rows 2, 3, 8 and 9, so their `MatrixLayout` has rows_per_group 2, gap 4 (rows 4 to 7) and first_row 2.

Each program of `_gather` and `_apply` handles a square tile of one matrix, and transposes it if the matrix is tall.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from textmill.kernels.transfer_torch import copy_to_device
from textmill.kernels.triton_support import tl, triton
from textmill.models import Weight
from textmill.models.parameter_groups import Rule

ALIGNMENT = 16
"""Alignment in bytes that kernels assume of every load_pointer."""


@triton.jit
def load_pointer(addresses, which):  # type: ignore[no-untyped-def]
    """Pointer to the tensor with this number."""
    return tl.multiple_of(tl.load(addresses + which).to(tl.pointer_type(tl.float32)), 16)


def can_update_in_place(tensor: Tensor) -> bool:
    """True if kernels can work on this tensor in place."""
    return tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


TILE_SIDE = 64
WARPS = 8
"""Rows and columns of a tile, and warps per tile."""
BLOCK = 4096
"""Elements per program of `_divide`."""


class MatrixLayout(NamedTuple):
    """Which rows of a parameter are a matrix; the kernels read these numbers in this order."""

    is_tall: bool
    """True if it has more rows than columns."""
    rows_per_group: int
    gap: int
    """Rows of other matrices between its rows of one group and those of the next."""
    first_row: int
    """Its first row in the parameter."""
    first_matrix: int
    """The number in the stack of the parameter's first matrix."""


def matrix_layouts(weight: Weight, parameter: Tensor, first_matrix: int) -> list[MatrixLayout]:
    """The matrices of a parameter, the first of which has this number in the stack."""
    rows, columns = parameter.shape
    layouts = []
    for part in weight.part_rows:
        rows_per_group = part.stop - part.start
        is_tall = rows_per_group * weight.groups > columns
        gap = rows // weight.groups - rows_per_group
        layouts.append(MatrixLayout(is_tall, rows_per_group, gap, part.start, first_matrix))
    return layouts


@triton.jit  # type: ignore[untyped-decorator]
def _locate_tile(layouts, matrix, R, C, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find this program's tile of a matrix, as it is in the parameter: not transposed.

    Returns two fields of the matrix's layout (is_tall, first_matrix), the tile's rows and columns in the matrix, which
    of these exist (a tile may extend beyond the matrix), and the offsets of its elements in the parameter.
    """
    layout = layouts + matrix * 5  # the fields of MatrixLayout
    is_tall = tl.load(layout) != 0
    rows_per_group = tl.load(layout + 1)
    gap = tl.load(layout + 2)
    first_row = tl.load(layout + 3)
    first_matrix = tl.load(layout + 4)
    matrix_rows = tl.where(is_tall, C, R)
    matrix_columns = tl.where(is_tall, R, C)
    # Tiles are numbered row by row in the stack, where a tall matrix is transposed.
    tiles_per_row = tl.cdiv(C, SIDE)
    stack_row = tl.program_id(0) // tiles_per_row
    stack_column = tl.program_id(0) % tiles_per_row
    rows = tl.where(is_tall, stack_column, stack_row) * SIDE + tl.arange(0, SIDE)
    columns = tl.where(is_tall, stack_row, stack_column) * SIDE + tl.arange(0, SIDE)
    groups_before = rows // rows_per_group
    parameter_rows = first_row + rows + groups_before * gap
    offsets = parameter_rows[:, None] * matrix_columns + columns[None, :]
    return is_tall, first_matrix, rows, columns, rows < matrix_rows, columns < matrix_columns, offsets


@triton.jit  # type: ignore[untyped-decorator]
def _gather(  # type: ignore[no-untyped-def]
    layouts, gradients, momenta, stack, tile_norms, gradient_factor, updated, R, C, gradient_weight, SIDE: tl.constexpr
):
    """Update a tile of a momentum; write Nesterov's look-ahead into the stack, and the norm of this tile."""
    matrix = tl.program_id(1).to(tl.int64)
    is_tall, first_matrix, rows, columns, row_exists, column_exists, offsets = _locate_tile(layouts, matrix, R, C, SIDE)
    exists = row_exists[:, None] & column_exists[None, :]
    is_updated = tl.load(updated)
    momentum_tile = momenta + first_matrix.to(tl.int64) * R * C + offsets
    momentum = tl.load(momentum_tile, mask=exists, other=0.0)
    gradient = tl.load(load_pointer(gradients, matrix) + offsets, mask=exists, other=0.0)
    gradient = tl.where(is_updated, gradient * tl.load(gradient_factor), 0.0)
    momentum = tl.where(is_updated, momentum + (gradient - momentum) * gradient_weight, momentum)
    tl.store(momentum_tile, momentum, mask=exists)
    look_ahead = (momentum - (momentum - gradient) * gradient_weight).to(stack.dtype.element_ty)
    rounded = look_ahead.to(tl.float32)
    tile_norm = tile_norms + matrix * tl.num_programs(0) + tl.program_id(0)
    tl.store(tile_norm, tl.sqrt(tl.sum(tl.sum(rounded * rounded, 1), 0)))
    stacked = stack + matrix * R * C
    if is_tall:
        transposed_exists = column_exists[:, None] & row_exists[None, :]
        tl.store(stacked + columns[:, None] * C + rows[None, :], tl.trans(look_ahead), mask=transposed_exists)
    else:
        tl.store(stacked + rows[:, None] * C + columns[None, :], look_ahead, mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _divide(stack, norms, matrix_size, min_norm, BLOCK_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Divide each matrix by its norm."""
    matrix = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    block = stack + matrix * matrix_size + offsets
    exists = offsets < matrix_size
    values = tl.load(block, mask=exists, other=0.0).to(tl.float32)
    norm = tl.maximum(tl.load(norms + matrix), min_norm)
    tl.store(block, (values / norm).to(stack.dtype.element_ty), mask=exists)


@triton.jit  # type: ignore[untyped-decorator]
def _apply(  # type: ignore[no-untyped-def]
    layouts, rules, weights, steps, rates, updated, R, C, SIDE: tl.constexpr
):
    """Decay a tile of a weight and apply its step; both are small, so they are summed before they are subtracted.

    `rules` has two numbers per matrix: the factor of its learning rate, and that factor x its weight decay; `rates` has
    the learning rate and the length of a step.
    """
    matrix = tl.program_id(1).to(tl.int64)
    is_tall, _, rows, columns, row_exists, column_exists, offsets = _locate_tile(layouts, matrix, R, C, SIDE)
    exists = row_exists[:, None] & column_exists[None, :]
    weight_tile = load_pointer(weights, matrix) + offsets
    stacked = steps + matrix * R * C
    weight = tl.load(weight_tile, mask=exists, other=0.0)
    if is_tall:
        transposed_exists = column_exists[:, None] & row_exists[None, :]
        step = tl.trans(tl.load(stacked + columns[:, None] * C + rows[None, :], mask=transposed_exists, other=0.0))
    else:
        step = tl.load(stacked + rows[:, None] * C + columns[None, :], mask=exists, other=0.0)
    decay = weight * (tl.load(rates) * tl.load(rules + matrix * 2 + 1))
    change = decay + step.to(tl.float32) * (tl.load(rates + 1) * tl.load(rules + matrix * 2))
    tl.store(weight_tile, tl.where(tl.load(updated), weight - change, weight), mask=exists)


class FusedStack:
    """`Stack` with fused kernels, for parameters on a GPU that `can_update_in_place` accepts."""

    def __init__(
        self,
        members: Sequence[tuple[Weight, nn.Parameter, Rule]],
        shape: tuple[int, int],
        momentum: float,
        min_norm: float,
    ) -> None:
        """`shape` is R and C; all matrices of the members have it."""
        self.shape = shape
        self.gradient_weight = 1 - momentum
        self.min_norm = min_norm
        self.parameters = [parameter for _, parameter, _ in members]
        self.matrices_per_parameter = [parameter.numel() // math.prod(shape) for parameter in self.parameters]
        layouts: list[MatrixLayout] = []
        rules: list[tuple[float, float]] = []
        for (weight, parameter, rule), count in zip(members, self.matrices_per_parameter, strict=True):
            layouts += matrix_layouts(weight, parameter, len(layouts))
            rules += [(rule.rate, rule.rate * rule.decay)] * count
        device = self.parameters[0].device
        self.matrix_count = len(layouts)
        self.layouts = torch.tensor(layouts, dtype=torch.int32, device=device)
        self.rules = torch.tensor(rules, dtype=torch.float32, device=device)
        self.flat_momenta = torch.zeros(self.matrix_count * math.prod(shape), device=device)
        sizes = [parameter.numel() for parameter in self.parameters]
        self.momenta = {
            parameter: values.view(parameter.shape)
            for parameter, values in zip(self.parameters, self.flat_momenta.split_with_sizes(sizes), strict=True)
        }
        tiles = triton.cdiv(shape[0], TILE_SIDE) * triton.cdiv(shape[1], TILE_SIDE)
        self.grid = tiles, self.matrix_count
        self.known_addresses: tuple[int, ...] = ()
        """Addresses of weights and gradients at the last step."""

    def gather(self, gradient_factor: Tensor, updated: Tensor) -> Tensor:
        """Update the momenta; return Nesterov's look-ahead, each matrix divided by its norm."""
        (R, C), device = self.shape, self.flat_momenta.device
        gradients = [_to_kernel_format(parameter.grad) for parameter in self.parameters]
        self._update_addresses(gradients)
        stack = torch.empty(self.matrix_count, R, C, dtype=torch.bfloat16, device=device)
        tile_norms = torch.empty(self.matrix_count, self.grid[0], device=device)
        _gather[self.grid](
            self.layouts,
            self.gradient_addresses,
            self.flat_momenta,
            stack,
            tile_norms,
            gradient_factor,
            updated,
            R,
            C,
            self.gradient_weight,
            SIDE=TILE_SIDE,
            num_warps=WARPS,
        )
        norms = torch.linalg.vector_norm(tile_norms, dim=1)
        blocks = triton.cdiv(R * C, BLOCK)
        _divide[blocks, self.matrix_count](stack, norms, R * C, self.min_norm, BLOCK_SIZE=BLOCK, num_warps=WARPS)
        return stack

    def apply(self, steps: Tensor, lr: float | Tensor, step_size: float | Tensor, updated: Tensor) -> None:
        """After `gather`: decay the weights by `lr` and subtract steps x `step_size`."""
        if isinstance(lr, Tensor) and isinstance(step_size, Tensor):
            rates = torch.stack([lr, step_size])
        else:
            rates = copy_to_device([lr, step_size], steps.device, torch.float32)
        _apply[self.grid](
            self.layouts,
            self.rules,
            self.weight_addresses,
            steps,
            rates,
            updated,
            *self.shape,
            SIDE=TILE_SIDE,
            num_warps=WARPS,
        )

    def read_momentum(self, found: dict[nn.Parameter, Tensor]) -> None:
        """Add the momentum of each parameter, in its own layout; not a copy."""
        found.update(self.momenta)

    def load_state(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set the momentum of a parameter, if it is in this stack."""
        if parameter in self.momenta:
            self.momenta[parameter].copy_(values)

    def _update_addresses(self, gradients: list[Tensor]) -> None:
        """Copy the addresses of each matrix's parameter and gradient to the device if they have changed."""
        addresses = tuple(tensor.data_ptr() for tensor in (*self.parameters, *gradients))
        if addresses == self.known_addresses:
            return
        counts = self.matrices_per_parameter * 2
        by_matrix = [address for address, count in zip(addresses, counts, strict=True) for _ in range(count)]
        on_device = copy_to_device(by_matrix, self.flat_momenta.device, torch.int64)
        self.weight_addresses, self.gradient_addresses = on_device.view(2, -1)
        self.known_addresses = addresses


def _to_kernel_format(gradient: Tensor | None) -> Tensor:
    """The gradient, or a contiguous fp32 copy of it if the kernels cannot read it."""
    assert gradient is not None
    if can_update_in_place(gradient):
        return gradient
    return gradient.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
