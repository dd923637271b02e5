"""Muon: momentum orthogonalised by Newton-Schulz iterations, for all matrices of one shape at once.

A step of a stack of matrices: `update_momenta` returns Nesterov's look-ahead, `orthogonalise` turns it into steps,
`apply` changes the weights. GPT-2's c_attn is three matrices (queries, keys, values), and so three entries.

Muon needs a matrix as a whole, but a rank of a mesh has only a part of it. So `ShardedMuon` assigns matrix number n to
rank n % world, its owner, which has its full momentum. A step of 4 matrices on 2 ranks:

1. All ranks gather the 4 gradients, one at a time. Rank 0 keeps those of 0 and 2, rank 1 those of 1 and 3.
2. Each owner computes the changes of its matrices. It does not have their weights, so Muon updates a parameter of zeros
   in their place: that parameter is the change afterwards. Weight decay has no effect on zeros, so it comes later.
3. Each owner broadcasts its changes, one at a time. Every rank decays its part of the matrix and adds its part of the
   change.

Shapes in names: B matrices of R rows and C columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from textmill.config import TrainConfig
from textmill.devices import copy_to_device
from textmill.engines.optimizers import Member
from textmill.engines.parallel_torch import Parallel
from textmill.kernels.triton_support import can_run_kernels, tl, triton
from textmill.models import Weight
from textmill.models.parameter_groups import Rule

STATE = ("momentum",)
COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 5
"""The quintic's coefficients in each of the five iterations of Newton-Schulz."""
ADAM_SCALE = 0.2
"""An orthogonal step times this and the root of its longer side is about as long as AdamW's, so learning rates carry
over."""
MIN_NORM = 1e-7


def takes(weight: Weight) -> bool:
    """Muon updates the matrices of blocks."""
    return weight.muon


def adamw_rate(train: TrainConfig) -> float:
    """`train.muon.adamw_rate_factor`."""
    return train.muon.adamw_rate_factor


def state_bytes(members: list[Member], parallel: Parallel) -> int:
    """The momenta; on a mesh, a rank has the momentum and the last change of some matrices in full."""
    if _is_whole(parallel):
        return sum(parallel.local(parameter).nbytes for _, parameter, _ in members)
    ranks = parallel.stage_ranks
    own = members[parallel.rank - ranks.start :: len(ranks)]
    return sum(2 * 4 * math.prod(weight.memory_shape) for weight, _, _ in own)


def new_optimizer(
    members: list[Member],
    train: TrainConfig,
    parallel: Parallel,
    full_parameters: dict[nn.Parameter, nn.Parameter],
    *,
    compiled: bool,
) -> Muon | ShardedMuon:
    """Muon, or Muon over matrices of which each rank has a part."""
    if _is_whole(parallel):
        return Muon(members, train.muon.momentum, compiled=compiled)
    return ShardedMuon(members, full_parameters, parallel, train.muon.momentum, compiled=compiled)


def _is_whole(parallel: Parallel) -> bool:
    """Whether a rank has entire matrices."""
    return parallel.mesh.shard * parallel.mesh.tensor == 1


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix of a parameter: queries, keys and values stored as one parameter are three."""

    parameter: nn.Parameter
    rule: Rule
    groups: int
    rows: slice
    """Its rows inside each group of the parameter's rows."""

    def view(self, values: Tensor) -> Tensor:
        """The matrix in a tensor of the parameter's layout: [groups, rows of a group, columns]."""
        return values.view(self.groups, -1, values.shape[-1])[:, self.rows]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the stacked matrix: rows <= columns."""
        groups, rows, columns = self.view(self.parameter.detach()).shape
        return min(groups * rows, columns), max(groups * rows, columns)

    def stacked(self, values: Tensor) -> Tensor:
        """The matrix of a tensor as [1, R, C] with R <= C."""
        matrix = self.view(values).reshape(1, -1, values.shape[-1])
        return matrix.mT if matrix.shape[1] > matrix.shape[2] else matrix

    def unstacked(self, matrix: Tensor) -> Tensor:
        """A stacked matrix in the shape of `view`."""
        groups, rows, columns = self.view(self.parameter.detach()).shape
        return (matrix.mT if groups * rows > columns else matrix).reshape(groups, rows, columns)


def matrices_of(weight: Weight, parameter: nn.Parameter, rule: Rule) -> list[Matrix]:
    """The matrices of a parameter that is not sharded."""
    return [Matrix(parameter, rule, weight.groups, rows) for rows in weight.part_rows]


class StackKey(NamedTuple):
    """What the matrices of a stack have in common."""

    rows: int
    columns: int
    whole: bool
    """True if the stack has all matrices of its parameters, which fused kernels need."""


class Muon:
    """Muon's update of block matrices, stacked by shape."""

    def __init__(self, members: list[Member], momentum: float, *, compiled: bool) -> None:
        matrices: dict[StackKey, list[Matrix]] = defaultdict(list)
        whole_members: dict[StackKey, list[Member]] = defaultdict(list)
        for member in members:
            parts = matrices_of(*member)
            whole = len({matrix.shape for matrix in parts}) == 1
            for matrix in parts:
                matrices[StackKey(*matrix.shape, whole)].append(matrix)
            if whole:
                whole_members[StackKey(*parts[0].shape, whole)].append(member)
        self.stacks = {
            key: _build_stack(matrices[key], whole_members[key], momentum, compiled=compiled) for key in list(matrices)
        }

    @torch.no_grad()
    def step(self, lr: float | Tensor, gradient_factor: Tensor, updated: Tensor, done: Tensor | None = None) -> None:
        """One update with gradients x `gradient_factor`, none if `updated` is false; does not wait for the device."""
        for key, stack in self.stacks.items():
            steps = orthogonalise(stack.update_momenta(gradient_factor, updated))
            stack.apply(steps, lr, lr * ADAM_SCALE * math.sqrt(key.columns), updated)

    def state(self) -> dict[str, dict[nn.Parameter, Tensor]]:
        """The momentum of each parameter, in its own layout."""
        momenta: dict[nn.Parameter, Tensor] = {}
        for stack in self.stacks.values():
            stack.read_momentum(momenta)
        return {"momentum": momenta}

    def load_state(self, name: str, parameter: nn.Parameter, values: Tensor) -> None:
        """Set the momentum of a parameter."""
        for stack in self.stacks.values():
            stack.load_state(parameter, values)


class Stack:
    """Matrices of one shape: the parts of an update before and after orthogonalisation."""

    def __init__(self, matrices: list[Matrix], momentum: float, *, compiled: bool) -> None:
        self.matrices = matrices
        self.beta = momentum
        self.blend: Callable[..., Tensor] = torch.compile(_blend, dynamic=False) if compiled else _blend
        self.momenta = self._stacked([torch.zeros_like(matrix.parameter) for matrix in matrices])
        self.decays: dict[float, list[Tensor]] = {}
        for matrix in matrices:
            view = matrix.view(matrix.parameter.detach())
            self.decays.setdefault(matrix.rule.rate * matrix.rule.decay, []).append(view)
        rates = [matrix.rule.rate for matrix in matrices]
        self.rates = torch.tensor(rates, device=self.momenta.device)[:, None, None]
        """The learning-rate factor of each matrix."""
        # On a CPU without bf16 units, bf16 takes minutes where fp32 takes seconds.
        self.precision = torch.bfloat16 if self.momenta.is_cuda else torch.float32

    def update_momenta(self, gradient_factor: Tensor, updated: Tensor) -> Tensor:
        """Update the momenta; return Nesterov's look-ahead, each matrix divided by its norm."""
        grads = self._stacked([matrix.parameter.grad for matrix in self.matrices])  # type: ignore[misc]
        return divide_by_norm(self.blend(self.momenta, grads, self.beta, gradient_factor, updated, self.precision))

    def apply(self, steps: Tensor, lr: float | Tensor, step_size: float | Tensor, updated: Tensor) -> None:
        """After `update_momenta`: decay the weights by `lr` and subtract steps x `step_size`."""
        for decay, views in self.decays.items():
            torch._foreach_mul_(views, torch.where(updated, 1 - lr * decay, 1.0))
        scaled = (steps.float() * (torch.where(updated, step_size, 0.0) * self.rates)).unsqueeze(1).unbind()
        views = [matrix.view(matrix.parameter.detach()) for matrix in self.matrices]
        torch._foreach_sub_(views, [matrix.unstacked(one) for matrix, one in zip(self.matrices, scaled, strict=True)])

    def read_momentum(self, found: dict[nn.Parameter, Tensor]) -> None:
        """Write each matrix's momentum into its parameter's tensor in `found`."""
        for matrix, momentum in zip(self.matrices, self.momenta.unsqueeze(1).unbind(), strict=True):
            values = found.setdefault(matrix.parameter, torch.empty_like(matrix.parameter.detach()))
            matrix.view(values).copy_(matrix.unstacked(momentum))

    def load_state(self, parameter: nn.Parameter, values: Tensor) -> None:
        """Set the momentum of a parameter's matrices in this stack."""
        for matrix, momentum in zip(self.matrices, self.momenta.unsqueeze(1).unbind(), strict=True):
            if matrix.parameter is parameter:
                momentum.copy_(matrix.stacked(values))

    def _stacked(self, values: list[Tensor]) -> Tensor:
        return torch.cat([matrix.stacked(one) for matrix, one in zip(self.matrices, values, strict=True)])


def _build_stack(
    matrices: list[Matrix], whole_members: list[Member], momentum: float, *, compiled: bool
) -> Stack | FusedStack:
    """A stack with fused kernels if they support its parameters, all of whose matrices are in it."""
    parameters = [parameter for _, parameter, _ in whole_members]
    if parameters and all(can_run_kernels(one) and can_update_in_place(one) for one in parameters):
        return FusedStack(whole_members, matrices[0].shape, momentum, MIN_NORM)
    return Stack(matrices, momentum, compiled=compiled)


def _blend(
    momenta: Tensor, grads: Tensor, beta: float, gradient_factor: Tensor, updated: Tensor, precision: torch.dtype
) -> Tensor:
    """Update the momenta in place; return Nesterov's look-ahead in this precision."""
    grads = torch.where(updated, grads * gradient_factor, 0.0)
    momenta.copy_(torch.where(updated, momenta.lerp(grads, 1 - beta), momenta))
    return grads.lerp(momenta, beta).to(precision)


def divide_by_norm(x_BRC: Tensor) -> Tensor:
    """Each matrix divided by its norm."""
    norms_B11: Tensor = x_BRC.norm(dim=(1, 2), keepdim=True)
    return x_BRC / norms_B11.clamp_min(MIN_NORM)


def orthogonalise(x_BRC: Tensor) -> Tensor:
    """Drive the singular values of matrices of norm 1 towards 1, in the precision of `x_BRC`.

    Each iteration multiplies the matrices by a polynomial of their Gram matrices. If R is much less than C, it is half
    the work to multiply the polynomials first; in bf16 that would not be precise enough.
    """
    if x_BRC.dtype == torch.float32 and 2 * x_BRC.shape[2] > 3 * x_BRC.shape[1]:
        return _multiply_polynomials(_gram(x_BRC)) @ x_BRC
    for linear, cubic, quintic in COEFFICIENTS:
        gram_BRR = _gram(x_BRC)
        factor_BRR = torch.baddbmm(gram_BRR, gram_BRR, gram_BRR, beta=cubic, alpha=quintic)
        x_BRC = torch.baddbmm(x_BRC, factor_BRR, x_BRC, beta=linear)
    return x_BRC


def _gram(x_BRC: Tensor) -> Tensor:
    return x_BRC @ (x_BRC.mT if x_BRC.is_cuda else x_BRC.mT.contiguous())  # a view is up to four times as slow on ARM


def _multiply_polynomials(gram_BRR: Tensor) -> Tensor:
    """The product of all iterations' polynomials, for matrices with this Gram matrix; they are symmetric and
    commute."""
    product_BRR = factor_BRR = _polynomial(gram_BRR, *COEFFICIENTS[0])
    for coefficients in COEFFICIENTS[1:]:
        gram_BRR = factor_BRR @ gram_BRR @ factor_BRR
        factor_BRR = _polynomial(gram_BRR, *coefficients)
        product_BRR = factor_BRR @ product_BRR
    return product_BRR


def _polynomial(gram_BRR: Tensor, linear: float, cubic: float, quintic: float) -> Tensor:
    found_BRR = torch.baddbmm(gram_BRR, gram_BRR, gram_BRR, beta=cubic, alpha=quintic)
    found_BRR.diagonal(dim1=-2, dim2=-1).add_(linear)
    return found_BRR


class ShardedMuon:
    """Muon over matrices that are assigned to the ranks of a pipeline stage, or to all, round-robin."""

    def __init__(
        self,
        matrices: list[Member],
        full_parameters: dict[nn.Parameter, nn.Parameter],
        parallel: Parallel,
        momentum: float,
        *,
        compiled: bool,
    ) -> None:
        """`matrices` have this rank's parts of them, `full_parameters` the net's parameter of each part."""
        self.matrices = matrices
        self.full_parameters = full_parameters
        self.parallel = parallel
        self.group = parallel.open_stage_group()
        self.changes: dict[int, nn.Parameter] = {}
        """The full change of each matrix that this rank owns, by the matrix's number."""
        members = []
        for number, matrix in enumerate(matrices):
            if self._owner(number) == parallel.rank:
                zeros = torch.zeros(matrix.weight.memory_shape, device=matrix.parameter.device)
                self.changes[number] = nn.Parameter(zeros)
                members.append(Member(matrix.weight, self.changes[number], matrix.rule))
        self.muon = Muon(members, momentum, compiled=compiled)

    def _owner(self, number: int) -> int:
        return self.parallel.stage_ranks[number % len(self.parallel.stage_ranks)]

    @torch.no_grad()
    def step(self, lr: float | Tensor, gradient_factor: Tensor, updated: Tensor, done: Tensor) -> None:
        """Muon's update of this rank's part of every matrix."""
        self._gather_gradients()
        for change in self.changes.values():
            change.zero_()
        self.muon.step(lr, gradient_factor, updated)
        for number, matrix in enumerate(self.matrices):
            decay = lr * matrix.rule.rate * matrix.rule.decay
            matrix.parameter.mul_(torch.where(updated, 1 - decay, 1.0))
            full_change = self._broadcast(number, self.changes.get(number))
            matrix.parameter.add_(self.parallel.local_part(matrix.weight, full_change))
        for change in self.changes.values():
            change.grad = None

    def _gather_gradients(self) -> None:
        """Gather the full gradient of every matrix; only its owner keeps it."""
        for number, matrix in enumerate(self.matrices):
            assert matrix.parameter.grad is not None
            full_gradient = self.parallel.gather_on_stage(
                matrix.weight, self.full_parameters[matrix.parameter], matrix.parameter.grad
            )
            if number in self.changes:
                self.changes[number].grad = full_gradient

    def _broadcast(self, number: int, full: Tensor | None) -> Tensor:
        """Broadcast a full tensor of a matrix's shape from its owner; `full` is None on the other ranks."""
        matrix = self.matrices[number]
        if full is None:
            values = matrix.parameter.new_empty(matrix.weight.memory_shape)
        else:
            values = full.detach().contiguous()
        dist.broadcast(values, self._owner(number), group=self.group)
        return values

    def state(self) -> dict[str, dict[nn.Parameter, Tensor]]:
        """This rank's part of each matrix's momentum."""
        full_momenta = self.muon.state()["momentum"]
        local_momenta = {}
        for number, matrix in enumerate(self.matrices):
            owned = full_momenta[self.changes[number]] if number in self.changes else None
            full = self._broadcast(number, owned)
            local_momenta[matrix.parameter] = self.parallel.local_part(matrix.weight, full).clone()
        return {"momentum": local_momenta}

    def load_state(self, name: str, parameter: nn.Parameter, values: Tensor) -> None:
        """Set the momentum of a parameter from each rank's part of it."""
        for number, matrix in enumerate(self.matrices):
            if matrix.parameter is parameter:
                full = self.parallel.gather_on_stage(
                    matrix.weight, self.full_parameters[parameter], values.to(parameter.device)
                )
                if number in self.changes:
                    self.muon.load_state(name, self.changes[number], full)


# On a GPU three Triton kernels update momenta and stack their look-ahead, divide by norms, and apply steps to weights.
#
# A stack is B matrices of R rows and C columns, R <= C; a tall matrix is stacked as its transpose. Weights, gradients
# and momenta stay in the layout of the parameter, of which a matrix is only some rows. A parameter [12, 4] of 2 heads:
#
#     row of the parameter   0  1   2  3   4  5   6  7   8  9  10 11
#                            q      k      v      q      k      v      `groups=2`, a head each
#
# The keys are rows 2, 3, 8 and 9, so their `MatrixLayout` has rows_per_group 2, gap 4 (rows 4 to 7) and first_row 2.
#
# Each program of `_update_momenta` and `_apply` handles a square tile of one matrix, transposed if the matrix is tall.

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
def _update_momenta(  # type: ignore[no-untyped-def]
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

    def update_momenta(self, gradient_factor: Tensor, updated: Tensor) -> Tensor:
        """Update the momenta; return Nesterov's look-ahead, each matrix divided by its norm."""
        (R, C), device = self.shape, self.flat_momenta.device
        gradients = [_to_kernel_format(parameter.grad) for parameter in self.parameters]
        self._update_addresses(gradients)
        stack = torch.empty(self.matrix_count, R, C, dtype=torch.bfloat16, device=device)
        tile_norms = torch.empty(self.matrix_count, self.grid[0], device=device)
        _update_momenta[self.grid](
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
        """After `update_momenta`: decay the weights by `lr` and subtract steps x `step_size`."""
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
