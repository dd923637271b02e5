"""Bias + GELU + fp8 quantisation in one Triton kernel, and its backward pass (with column sums) in another.

A program holds one full row in registers, so the row's maximum is known before anything is written. Programs
interleave rows, so that together they read memory from start to end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from textmill.kernels.column_sums_triton import summed
from textmill.kernels.gelu_triton import phi_of
from textmill.kernels.require_triton import tl, triton

COLUMNS, PROGRAMS = 16, 2112
"""Columns per thread (which determines the warps), and the number of programs."""
COLUMNS_BACK, PROGRAMS_BACK = 16, 264
"""The same for the backward pass, where each program keeps its own column sums."""
VECTOR = tl.constexpr(8)
"""Adjacent columns per thread: one bf16 vector load; fp8 uses the same number to avoid a layout conversion."""


@triton.jit
def _nan_max(one, other):  # type: ignore[no-untyped-def]
    """Maximum that propagates NaN: a row with a NaN must not look finite."""
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator]
def _row_scale(row, TINY: tl.constexpr, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same scale as in fp8_torch."""
    return tl.div_rn(_nan_max(tl.reduce(tl.abs(row), 0, _nan_max), TINY), LARGEST)


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    h, bias, y, y8, scales, rows, width, TANH: tl.constexpr, TINY: tl.constexpr, LARGEST: tl.constexpr, C: tl.constexpr
):
    columns = tl.max_contiguous(tl.arange(0, C), VECTOR)
    inside = columns < width
    given = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64)
    h_now = tl.load(h + row * width + columns, mask=inside & (row < rows), other=0.0)
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        values, now, at = h_now.to(tl.float32) + given, row, row * width + columns
        row += tl.num_programs(0)  # prefetch the next row
        h_now = tl.load(h + row * width + columns, mask=inside & (row < rows), other=0.0)
        phi, _ = phi_of(values, TANH)
        out = (values * phi).to(y.dtype.element_ty)
        tl.store(y + at, out, mask=inside)
        rounded = out.to(tl.float32)
        scale = _row_scale(rounded, TINY, LARGEST)
        tl.store(y8 + at, (rounded * tl.div_rn(1.0, scale)).to(y8.dtype.element_ty), mask=inside)
        tl.store(scales + now, scale)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    dy, h, bias, dx, dx8, scales, sums, rows, width,
    TANH: tl.constexpr, TINY: tl.constexpr, LARGEST: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    columns = tl.max_contiguous(tl.arange(0, C), VECTOR)
    inside = columns < width
    given = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([C], tl.float32)
    at, here = row * width + columns, inside & (row < rows)
    h_now, dy_now = tl.load(h + at, mask=here, other=0.0), tl.load(dy + at, mask=here, other=0.0)
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        values, upstream = h_now.to(tl.float32) + given, dy_now.to(tl.float32)
        now, at = row, row * width + columns
        row += tl.num_programs(0)  # prefetch the next row
        after, valid = row * width + columns, inside & (row < rows)
        h_now, dy_now = tl.load(h + after, mask=valid, other=0.0), tl.load(dy + after, mask=valid, other=0.0)
        phi, derivative = phi_of(values, TANH)
        exact = upstream * (phi + values * derivative)
        total += exact
        out = exact.to(dx.dtype.element_ty)
        tl.store(dx + at, out, mask=inside)
        rounded = out.to(tl.float32)
        scale = _row_scale(rounded, TINY, LARGEST)
        tl.store(dx8 + at, (rounded * tl.div_rn(1.0, scale)).to(dx8.dtype.element_ty), mask=inside)
        tl.store(scales + now, scale)
    tl.store(sums + tl.program_id(0) * width + columns, total, mask=inside)


def _warps(width: int, columns: int) -> int:
    """Warps of a program with so many columns per thread."""
    return min(max(int(triton.next_power_of_2(width)) // (32 * columns), 1), 32)


def forward(h_MF: Tensor, bias_F: Tensor, tanh: bool, kind: torch.dtype, tiny: float) -> tuple[Tensor, Tensor, Tensor]:
    """The Triton version of fp8_torch.bias_gelu8; h is contiguous."""
    rows, width = h_MF.shape
    y_MF, y8_MF = torch.empty_like(h_MF), torch.empty_like(h_MF, dtype=kind)
    scale_M1 = torch.empty(rows, 1, device=h_MF.device)
    programs, constants = min(PROGRAMS, rows), {"TANH": tanh, "TINY": tiny, "LARGEST": torch.finfo(kind).max}
    given = h_MF, bias_F, y_MF, y8_MF, scale_M1, rows, width
    _forward[(programs,)](*given, **constants, C=triton.next_power_of_2(width), num_warps=_warps(width, COLUMNS))
    return y_MF, y8_MF, scale_M1


def backward(
    dy_MF: Tensor, h_MF: Tensor, bias_F: Tensor, tanh: bool, kind: torch.dtype, tiny: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The Triton version of fp8_torch.bias_gelu8_backward; all matrices are contiguous."""
    rows, width = h_MF.shape
    dx_MF, dx8_MF = torch.empty_like(h_MF), torch.empty_like(h_MF, dtype=kind)
    scale_M1 = torch.empty(rows, 1, device=h_MF.device)
    programs, constants = min(PROGRAMS_BACK, rows), {"TANH": tanh, "TINY": tiny, "LARGEST": torch.finfo(kind).max}
    sums = torch.empty(programs, width, device=h_MF.device)
    given = dy_MF, h_MF, bias_F, dx_MF, dx8_MF, scale_M1, sums, rows, width
    _backward[(programs,)](*given, **constants, C=triton.next_power_of_2(width), num_warps=_warps(width, COLUMNS_BACK))
    return dx_MF, dx8_MF, scale_M1, summed(sums)
