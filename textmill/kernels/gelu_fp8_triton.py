"""A bias and GELU with its rows rounded to fp8 in one Triton kernel, and their gradients, rounded too and summed by column, in another.

A program has a whole row at a time in its registers: the row's greatest number is known before anything of it is written. Programs
take turns row by row, so that together they go through memory from its beginning to its end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from textmill.kernels.column_sums_triton import summed
from textmill.kernels.gelu_triton import phi_of
from textmill.kernels.require_triton import tl, triton

COLUMNS, PROGRAMS = 16, 2112
"""Columns of a row that a thread has, which make the warps, and the programs down the rows."""
COLUMNS_BACK, PROGRAMS_BACK = 16, 264
"""The same of the backward pass, whose programs have sums of their own."""
VECTOR = tl.constexpr(8)
"""Neighbouring columns of a thread: what it loads of bf16 at a time, in fp8 too, or rows would be dealt anew between the two."""


@triton.jit
def _greater(one, other):  # type: ignore[no-untyped-def]
    """What is no number is the greatest of all: a row that has one must not look like one that has none."""
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator]
def _scale_of(row, TINY: tl.constexpr, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """As fp8_torch's rows8 has it."""
    return tl.div_rn(_greater(tl.reduce(tl.abs(row), 0, _greater), TINY), MOST)


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    h, bias, y, y8, scales, rows, width, TANH: tl.constexpr, TINY: tl.constexpr, MOST: tl.constexpr, C: tl.constexpr
):
    columns = tl.max_contiguous(tl.arange(0, C), VECTOR)
    inside = columns < width
    given = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64)
    h_now = tl.load(h + row * width + columns, mask=inside & (row < rows), other=0.0)
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        values, now, at = h_now.to(tl.float32) + given, row, row * width + columns
        row += tl.num_programs(0)  # the next is on its way while this one is worked on
        h_now = tl.load(h + row * width + columns, mask=inside & (row < rows), other=0.0)
        phi, _ = phi_of(values, TANH)
        out = (values * phi).to(y.dtype.element_ty)
        tl.store(y + at, out, mask=inside)
        rounded = out.to(tl.float32)
        scale = _scale_of(rounded, TINY, MOST)
        tl.store(y8 + at, (rounded * tl.div_rn(1.0, scale)).to(y8.dtype.element_ty), mask=inside)
        tl.store(scales + now, scale)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    dy, h, bias, dx, dx8, scales, sums, rows, width,
    TANH: tl.constexpr, TINY: tl.constexpr, MOST: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    columns = tl.max_contiguous(tl.arange(0, C), VECTOR)
    inside = columns < width
    given = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([C], tl.float32)
    at, here = row * width + columns, inside & (row < rows)
    h_now, dy_now = tl.load(h + at, mask=here, other=0.0), tl.load(dy + at, mask=here, other=0.0)
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        values, slopes = h_now.to(tl.float32) + given, dy_now.to(tl.float32)
        now, at = row, row * width + columns
        row += tl.num_programs(0)  # the next is on its way while this one is worked on
        after, there = row * width + columns, inside & (row < rows)
        h_now, dy_now = tl.load(h + after, mask=there, other=0.0), tl.load(dy + after, mask=there, other=0.0)
        phi, slope = phi_of(values, TANH)
        exact = slopes * (phi + values * slope)
        total += exact
        out = exact.to(dx.dtype.element_ty)
        tl.store(dx + at, out, mask=inside)
        rounded = out.to(tl.float32)
        scale = _scale_of(rounded, TINY, MOST)
        tl.store(dx8 + at, (rounded * tl.div_rn(1.0, scale)).to(dx8.dtype.element_ty), mask=inside)
        tl.store(scales + now, scale)
    tl.store(sums + tl.program_id(0) * width + columns, total, mask=inside)


def _warps(width: int, columns: int) -> int:
    """Warps of a program whose threads have so many columns each."""
    return min(max(int(triton.next_power_of_2(width)) // (32 * columns), 1), 32)


def forward(h_MF: Tensor, bias_F: Tensor, tanh: bool, kind: torch.dtype, tiny: float) -> tuple[Tensor, Tensor, Tensor]:
    """As fp8_torch's op has it; h without gaps."""
    rows, width = h_MF.shape
    y_MF, y8_MF = torch.empty_like(h_MF), torch.empty_like(h_MF, dtype=kind)
    scale_M1 = torch.empty(rows, 1, device=h_MF.device)
    programs, constants = min(PROGRAMS, rows), {"TANH": tanh, "TINY": tiny, "MOST": torch.finfo(kind).max}
    given = h_MF, bias_F, y_MF, y8_MF, scale_M1, rows, width
    _forward[(programs,)](*given, **constants, C=triton.next_power_of_2(width), num_warps=_warps(width, COLUMNS))
    return y_MF, y8_MF, scale_M1


def backward(
    dy_MF: Tensor, h_MF: Tensor, bias_F: Tensor, tanh: bool, kind: torch.dtype, tiny: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As fp8_torch's op has it; matrices without gaps."""
    rows, width = h_MF.shape
    dx_MF, dx8_MF = torch.empty_like(h_MF), torch.empty_like(h_MF, dtype=kind)
    scale_M1 = torch.empty(rows, 1, device=h_MF.device)
    programs, constants = min(PROGRAMS_BACK, rows), {"TANH": tanh, "TINY": tiny, "MOST": torch.finfo(kind).max}
    sums = torch.empty(programs, width, device=h_MF.device)
    given = dy_MF, h_MF, bias_F, dx_MF, dx8_MF, scale_M1, sums, rows, width
    _backward[(programs,)](*given, **constants, C=triton.next_power_of_2(width), num_warps=_warps(width, COLUMNS_BACK))
    return dx_MF, dx8_MF, scale_M1, summed(sums)
