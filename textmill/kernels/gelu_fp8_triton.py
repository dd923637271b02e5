"""Bias + GELU + fp8 quantisation in one Triton kernel; the backward pass, with the bias gradient, in another.

The same for the gate of a gated MLP, without biases.

A program holds one full row in registers, so the row's maximum is known before anything is written.
Of P programs, program i processes the rows i, i + P, i + 2P ..., so that together they read memory sequentially.
"""

from __future__ import annotations

import torch
from torch import Tensor

from textmill.kernels.column_sums_triton import column_sums
from textmill.kernels.gelu_triton import phi_and_derivative
from textmill.kernels.require_triton import tl, triton

COLUMNS_PER_THREAD = 16
PROGRAMS = 2112
"""Forward pass: columns per thread, which determines the number of warps, and the number of programs."""
BACKWARD_COLUMNS_PER_THREAD = 16
BACKWARD_PROGRAMS = 264
"""The same for the backward pass, where each program also writes one row of partial column sums."""
VECTOR = tl.constexpr(8)
"""Adjacent columns per thread: one bf16 vector load; fp8 uses the same number to avoid a layout conversion."""


@triton.jit
def _nan_max(a, b):  # type: ignore[no-untyped-def]
    """Maximum that propagates NaN: a row with a NaN must not look finite."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator]
def _row_scale(row, MIN_ROW_MAX: tl.constexpr, FP8_MAX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the row's largest magnitude divided by the largest fp8 number, as `fp8_torch.quantize_rows` does."""
    return tl.div_rn(_nan_max(tl.reduce(tl.abs(row), 0, _nan_max), MIN_ROW_MAX), FP8_MAX)


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    h,
    bias,
    y,
    y8,
    scales,
    rows,
    width,
    TANH: tl.constexpr,
    MIN_ROW_MAX: tl.constexpr,
    FP8_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)
    column_mask = columns < width
    bias_values = tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64)
    next_h = tl.load(h + row * width + columns, mask=column_mask & (row < rows), other=0.0)
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        values = next_h.to(tl.float32) + bias_values
        current_row = row
        offsets = row * width + columns
        row += tl.num_programs(0)  # prefetch the next row
        next_h = tl.load(h + row * width + columns, mask=column_mask & (row < rows), other=0.0)
        phi, _ = phi_and_derivative(values, TANH)
        out = (values * phi).to(y.dtype.element_ty)
        tl.store(y + offsets, out, mask=column_mask)
        out_fp32 = out.to(tl.float32)
        scale = _row_scale(out_fp32, MIN_ROW_MAX, FP8_MAX)
        tl.store(y8 + offsets, (out_fp32 * tl.div_rn(1.0, scale)).to(y8.dtype.element_ty), mask=column_mask)
        tl.store(scales + current_row, scale)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    dy,
    h,
    bias,
    dx,
    dx8,
    scales,
    partial_sums,
    rows,
    width,
    TANH: tl.constexpr,
    MIN_ROW_MAX: tl.constexpr,
    FP8_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)
    column_mask = columns < width
    bias_values = tl.load(bias + columns, mask=column_mask, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64)
    column_totals = tl.zeros([BLOCK], tl.float32)
    offsets = row * width + columns
    first_mask = column_mask & (row < rows)
    next_h = tl.load(h + offsets, mask=first_mask, other=0.0)
    next_dy = tl.load(dy + offsets, mask=first_mask, other=0.0)
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        values = next_h.to(tl.float32) + bias_values
        dy_values = next_dy.to(tl.float32)
        current_row = row
        offsets = row * width + columns
        row += tl.num_programs(0)  # prefetch the next row
        next_offsets = row * width + columns
        next_mask = column_mask & (row < rows)
        next_h = tl.load(h + next_offsets, mask=next_mask, other=0.0)
        next_dy = tl.load(dy + next_offsets, mask=next_mask, other=0.0)
        phi, derivative = phi_and_derivative(values, TANH)
        dx_fp32 = dy_values * (phi + values * derivative)
        column_totals += dx_fp32
        out = dx_fp32.to(dx.dtype.element_ty)
        tl.store(dx + offsets, out, mask=column_mask)
        out_fp32 = out.to(tl.float32)
        scale = _row_scale(out_fp32, MIN_ROW_MAX, FP8_MAX)
        tl.store(dx8 + offsets, (out_fp32 * tl.div_rn(1.0, scale)).to(dx8.dtype.element_ty), mask=column_mask)
        tl.store(scales + current_row, scale)
    tl.store(partial_sums + tl.program_id(0) * width + columns, column_totals, mask=column_mask)


@triton.jit  # type: ignore[untyped-decorator]
def _active_and_slope(x, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
    """SiLU or squared ReLU, and its derivative."""
    if SILU:
        share = tl.sigmoid(x)
        active = x * share
        slope = share * (1.0 + x * (1.0 - share))
    else:
        positive = _nan_max(x, 0.0)
        active = positive * positive
        slope = 2.0 * positive
    return active, slope


@triton.jit  # type: ignore[untyped-decorator]
def _gate_forward(  # type: ignore[no-untyped-def]
    h,
    y8,
    scales,
    rows,
    width,
    SILU: tl.constexpr,
    MIN_ROW_MAX: tl.constexpr,
    FP8_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)
    column_mask = columns < width
    row = tl.program_id(0).to(tl.int64)
    offsets = row * 2 * width + columns
    mask = column_mask & (row < rows)
    next_gate = tl.load(h + offsets, mask=mask, other=0.0)
    next_up = tl.load(h + offsets + width, mask=mask, other=0.0)
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        gate = next_gate.to(tl.float32)
        up = next_up.to(tl.float32)
        current_row = row
        row += tl.num_programs(0)  # prefetch the next row
        offsets = row * 2 * width + columns
        mask = column_mask & (row < rows)
        next_gate = tl.load(h + offsets, mask=mask, other=0.0)
        next_up = tl.load(h + offsets + width, mask=mask, other=0.0)
        active, _ = _active_and_slope(gate, SILU)
        out = (active * up).to(h.dtype.element_ty).to(tl.float32)
        scale = _row_scale(out, MIN_ROW_MAX, FP8_MAX)
        out8 = (out * tl.div_rn(1.0, scale)).to(y8.dtype.element_ty)
        tl.store(y8 + current_row * width + columns, out8, mask=column_mask)
        tl.store(scales + current_row, scale)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_backward(  # type: ignore[no-untyped-def]
    dy,
    h,
    y,
    dh,
    dh8,
    scales,
    rows,
    width,
    SILU: tl.constexpr,
    MIN_ROW_MAX: tl.constexpr,
    FP8_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)
    mask = columns < width
    row = tl.program_id(0).to(tl.int64)
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        offsets = row * 2 * width + columns
        gate = tl.load(h + offsets, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(h + offsets + width, mask=mask, other=0.0).to(tl.float32)
        dy_values = tl.load(dy + row * width + columns, mask=mask, other=0.0).to(tl.float32)
        active, slope = _active_and_slope(gate, SILU)
        tl.store(y + row * width + columns, (active * up).to(y.dtype.element_ty), mask=mask)
        dgate = (dy_values * up * slope).to(dh.dtype.element_ty)
        dup = (dy_values * active).to(dh.dtype.element_ty)
        tl.store(dh + offsets, dgate, mask=mask)
        tl.store(dh + offsets + width, dup, mask=mask)
        dgate_fp32 = dgate.to(tl.float32)
        dup_fp32 = dup.to(tl.float32)
        scale = _nan_max(_row_scale(dgate_fp32, MIN_ROW_MAX, FP8_MAX), _row_scale(dup_fp32, MIN_ROW_MAX, FP8_MAX))
        inverse = tl.div_rn(1.0, scale)
        tl.store(dh8 + offsets, (dgate_fp32 * inverse).to(dh8.dtype.element_ty), mask=mask)
        tl.store(dh8 + offsets + width, (dup_fp32 * inverse).to(dh8.dtype.element_ty), mask=mask)
        tl.store(scales + row, scale)
        row += tl.num_programs(0)


def _warp_count(width: int, columns: int) -> int:
    """Return the warps that a program needs for a row, with this number of columns per thread."""
    return min(max(int(triton.next_power_of_2(width)) // (32 * columns), 1), 32)


def forward(
    h_MF: Tensor, bias_F: Tensor, tanh: bool, dtype: torch.dtype, min_row_max: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The Triton version of fp8_torch.bias_gelu8; h is contiguous."""
    rows, width = h_MF.shape
    y_MF = torch.empty_like(h_MF)
    y8_MF = torch.empty_like(h_MF, dtype=dtype)
    scale_M1 = torch.empty(rows, 1, device=h_MF.device)
    programs = min(PROGRAMS, rows)
    constants = {"TANH": tanh, "MIN_ROW_MAX": min_row_max, "FP8_MAX": torch.finfo(dtype).max}
    arguments = h_MF, bias_F, y_MF, y8_MF, scale_M1, rows, width
    block = triton.next_power_of_2(width)
    warps = _warp_count(width, COLUMNS_PER_THREAD)
    _forward[(programs,)](*arguments, **constants, BLOCK=block, num_warps=warps)
    return y_MF, y8_MF, scale_M1


def backward(
    dy_MF: Tensor, h_MF: Tensor, bias_F: Tensor, tanh: bool, dtype: torch.dtype, min_row_max: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The Triton version of fp8_torch.bias_gelu8_backward; all matrices are contiguous."""
    rows, width = h_MF.shape
    dx_MF = torch.empty_like(h_MF)
    dx8_MF = torch.empty_like(h_MF, dtype=dtype)
    scale_M1 = torch.empty(rows, 1, device=h_MF.device)
    programs = min(BACKWARD_PROGRAMS, rows)
    constants = {"TANH": tanh, "MIN_ROW_MAX": min_row_max, "FP8_MAX": torch.finfo(dtype).max}
    partial_sums = torch.empty(programs, width, device=h_MF.device)
    arguments = dy_MF, h_MF, bias_F, dx_MF, dx8_MF, scale_M1, partial_sums, rows, width
    block = triton.next_power_of_2(width)
    warps = _warp_count(width, BACKWARD_COLUMNS_PER_THREAD)
    _backward[(programs,)](*arguments, **constants, BLOCK=block, num_warps=warps)
    return dx_MF, dx8_MF, scale_M1, column_sums(partial_sums)


def gate_forward(h_MF: Tensor, silu: bool, dtype: torch.dtype, min_row_max: float) -> tuple[Tensor, Tensor]:
    """The Triton version of fp8_torch.gate8; h is contiguous."""
    rows = len(h_MF)
    width = h_MF.shape[1] // 2
    y8_MF = h_MF.new_empty(rows, width, dtype=dtype)
    scale_M1 = torch.empty(rows, 1, device=h_MF.device)
    constants = {"SILU": silu, "MIN_ROW_MAX": min_row_max, "FP8_MAX": torch.finfo(dtype).max}
    block = triton.next_power_of_2(width)
    warps = _warp_count(width, COLUMNS_PER_THREAD)
    _gate_forward[(min(PROGRAMS, rows),)](h_MF, y8_MF, scale_M1, rows, width, **constants, BLOCK=block, num_warps=warps)
    return y8_MF, scale_M1


def gate_backward(
    dy_MF: Tensor, h_MF: Tensor, silu: bool, dtype: torch.dtype, min_row_max: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The Triton version of fp8_torch.gate8_backward; all matrices are contiguous."""
    rows, width = dy_MF.shape
    y_MF = torch.empty_like(dy_MF)
    dh_MF = torch.empty_like(h_MF)
    dh8_MF = torch.empty_like(h_MF, dtype=dtype)
    scale_M1 = torch.empty(rows, 1, device=h_MF.device)
    constants = {"SILU": silu, "MIN_ROW_MAX": min_row_max, "FP8_MAX": torch.finfo(dtype).max}
    block = triton.next_power_of_2(width)
    warps = _warp_count(width, BACKWARD_COLUMNS_PER_THREAD)
    _gate_backward[(min(PROGRAMS, rows),)](
        dy_MF, h_MF, y_MF, dh_MF, dh8_MF, scale_M1, rows, width, **constants, BLOCK=block, num_warps=warps
    )
    return y_MF, dh_MF, dh8_MF, scale_M1
