"""fp8 matmuls with one scale per row, and MLPs built from them.

The output and the gradient of the inputs are fp8 matmuls; the gradient of the weights, which sums over rows, stays in
bf16. Scaling and rounding are torch operations, which the compiler fuses into the kernel that produces the numbers.
Only around the activation, the widest tensor, Triton kernels of our own do both; they read and write each row once.

Shapes in names: M rows, K summed over, N columns, F inner width of the MLP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from textmill.kernels.gelu_torch import phi_and_derivative
from textmill.kernels.matmul_torch import matmul_to_dtype
from textmill.kernels.triton_support import can_run_kernels, tl, triton

FP8_DTYPE = torch.float8_e4m3fn
"""e4m3 for everything: with one scale per row gradients do not need the wider range of e5m2."""
MIN_ROW_MAX = 1e-30
"""Lower bound of a row's largest magnitude, so that the scale of a row of zeros is not 0."""
WIDTH_MULTIPLE = 16
"""fp8 matmuls need widths that are multiples of this."""
FP8_GATES = ("silu", "relu2")
"""Activations of the gate in gated MLPs."""

QuantizedRows = tuple[Tensor, Tensor]
"""Rows in fp8 [M, K] and their scales [M, 1]."""


def quantize_rows(x_MK: Tensor) -> QuantizedRows:
    """Quantise to fp8: each row is scaled so that its largest magnitude becomes the largest fp8 number."""
    x_MK = x_MK.float()
    scale_M1 = x_MK.abs().amax(1, keepdim=True).clamp_min(MIN_ROW_MAX) / torch.finfo(FP8_DTYPE).max
    return (x_MK / scale_M1).to(FP8_DTYPE).contiguous(), scale_M1


def fp8_matmul(a: QuantizedRows, b: QuantizedRows) -> Tensor:
    """a times b's transpose, in bf16."""
    (a_MK, a_M1), (b_NK, b_N1) = a, b
    return torch._scaled_mm(
        a_MK, b_NK.T, scale_a=a_M1, scale_b=b_N1.view(1, -1), out_dtype=torch.bfloat16, use_fast_accum=True
    )


def fp8_mlp(x_MK: Tensor, fc_FK: Tensor, bias_F: Tensor, proj_NF: Tensor, tanh: bool) -> Tensor:
    """Two linear layers, the second without its bias, and a GELU between them."""
    y_MN: Tensor = _FP8MLP.apply(x_MK.to(torch.bfloat16), fc_FK, bias_F, proj_NF, tanh)  # type: ignore[no-untyped-call]
    return y_MN


class _FP8MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, fc_FK: Tensor, bias_F: Tensor, proj_NF: Tensor, tanh: bool) -> Tensor:
        h_MF = fp8_matmul(quantize_rows(x_MK), quantize_rows(fc_FK))
        y_MF, y8_MF, scale_M1 = bias_gelu8(h_MF, bias_F, tanh)
        ctx.save_for_backward(x_MK, h_MF, y_MF, fc_FK, bias_F, proj_NF)
        ctx.tanh = tanh
        return fp8_matmul((y8_MF, scale_M1), quantize_rows(proj_NF))

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, h_MF, y_MF, fc_FK, bias_F, proj_NF = ctx.saved_tensors
        needs_dfc = ctx.needs_input_grad[1]
        needs_dproj = ctx.needs_input_grad[3]
        dproj_NF = matmul_to_dtype(dy_MN.T, y_MF, proj_NF.dtype) if needs_dproj else None
        dy_MF = fp8_matmul(quantize_rows(dy_MN), quantize_rows(proj_NF.T))
        dh_MF, dh8_MF, scale_M1, sums_F = bias_gelu8_backward(dy_MF, h_MF, bias_F, ctx.tanh)
        dfc_FK = matmul_to_dtype(dh_MF.T, x_MK, fc_FK.dtype) if needs_dfc else None
        return fp8_matmul((dh8_MF, scale_M1), quantize_rows(fc_FK.T)), dfc_FK, sums_F.to(bias_F.dtype), dproj_NF, None


def fp8_gated_mlp(x_MK: Tensor, gate_FK: Tensor, up_FK: Tensor, down_NF: Tensor, activation: str) -> Tensor:
    """Two linear layers side by side, the first one's outputs activated as a gate of the second's, then one back."""
    given = x_MK.to(torch.bfloat16), gate_FK, up_FK, down_NF, activation
    y_MN: Tensor = _FP8GatedMLP.apply(*given)  # type: ignore[no-untyped-call]
    return y_MN


class _FP8GatedMLP(torch.autograd.Function):
    """Gate and up are one matmul; for the backward pass its output is kept, not what is computed from it."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, gate_FK: Tensor, up_FK: Tensor, down_NF: Tensor, activation: str) -> Tensor:
        h_MF = fp8_matmul(quantize_rows(x_MK), quantize_rows(torch.cat([gate_FK, up_FK])))
        ctx.save_for_backward(x_MK, h_MF, gate_FK, up_FK, down_NF)
        ctx.activation = activation
        return fp8_matmul(gate8(h_MF, activation == "silu"), quantize_rows(down_NF))

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, h_MF, gate_FK, up_FK, down_NF = ctx.saved_tensors
        _, for_gate, for_up, for_down, _ = ctx.needs_input_grad
        dy_MF = fp8_matmul(quantize_rows(dy_MN), quantize_rows(down_NF.T))
        y_MF, dh_MF, dh8_MF, scale_M1 = gate8_backward(dy_MF, h_MF, ctx.activation == "silu")
        ddown_NF = matmul_to_dtype(dy_MN.T, y_MF, down_NF.dtype) if for_down else None
        dgate_FK = dup_FK = None
        if for_gate or for_up:
            dgate_FK, dup_FK = matmul_to_dtype(dh_MF.T, x_MK, gate_FK.dtype).split(len(gate_FK))
        dx_MK = fp8_matmul((dh8_MF, scale_M1), quantize_rows(torch.cat([gate_FK.T, up_FK.T], 1)))
        return dx_MK, dgate_FK if for_gate else None, dup_FK if for_up else None, ddown_NF, None


def _active_and_slope(gate_MF: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    """SiLU or squared ReLU, and its derivative."""
    if silu:
        share_MF = gate_MF.sigmoid()
        return gate_MF * share_MF, share_MF * (1 + gate_MF * (1 - share_MF))
    positive_MF = F.relu(gate_MF)
    return positive_MF.square(), 2 * positive_MF


@torch.library.custom_op("textmill::gate8", mutates_args=())
def gate8(h_MF: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    """The first half of the columns, through SiLU or squared ReLU, times the second half; in fp8 with rows' scales."""
    if can_run_kernels(h_MF):
        return _run_gate(h_MF, silu)
    gate_MF, up_MF = h_MF.float().chunk(2, 1)
    return quantize_rows((_active_and_slope(gate_MF, silu)[0] * up_MF).to(h_MF.dtype))


@torch.library.custom_op("textmill::gate8_backward", mutates_args=())
def gate8_backward(dy_MF: Tensor, h_MF: Tensor, silu: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The product again, in h's precision; the gradient of h, in h's precision and in fp8 with the rows' scales."""
    if can_run_kernels(h_MF):
        return _run_gate_backward(dy_MF, h_MF, silu)
    (gate_MF, up_MF), wide_MF = h_MF.float().chunk(2, 1), dy_MF.float()
    active_MF, slope_MF = _active_and_slope(gate_MF, silu)
    dh_MF = torch.cat([wide_MF * up_MF * slope_MF, wide_MF * active_MF], 1).to(h_MF.dtype)
    return (active_MF * up_MF).to(h_MF.dtype), dh_MF, *quantize_rows(dh_MF)


@gate8.register_fake
def _(h_MF: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    rows = h_MF.shape[0]
    width = h_MF.shape[1] // 2
    return h_MF.new_empty(rows, width, dtype=FP8_DTYPE), h_MF.new_empty(rows, 1, dtype=torch.float32)


@gate8_backward.register_fake
def _(dy_MF: Tensor, h_MF: Tensor, silu: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale_M1 = h_MF.new_empty(len(h_MF), 1, dtype=torch.float32)
    return torch.empty_like(dy_MF), torch.empty_like(h_MF), torch.empty_like(h_MF, dtype=FP8_DTYPE), scale_M1


@torch.library.custom_op("textmill::bias_gelu8", mutates_args=())
def bias_gelu8(h_MF: Tensor, bias_F: Tensor, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    """GELU of h + bias, in h's precision and in fp8 with the rows' scales."""
    if can_run_kernels(h_MF):
        return _run_gelu(h_MF, bias_F, tanh)
    y_MF = F.gelu(h_MF.float() + bias_F.float(), approximate="tanh" if tanh else "none").to(h_MF.dtype)
    return y_MF, *quantize_rows(y_MF)


@torch.library.custom_op("textmill::bias_gelu8_backward", mutates_args=())
def bias_gelu8_backward(
    dy_MF: Tensor, h_MF: Tensor, bias_F: Tensor, tanh: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of h, in h's precision and in fp8 with the rows' scales, and the gradient of the bias in fp32."""
    if can_run_kernels(h_MF):
        return _run_gelu_backward(dy_MF, h_MF, bias_F, tanh)
    x_MF = h_MF.float() + bias_F.float()
    dx_fp32_MF = torch.ops.aten.gelu_backward(dy_MF.float(), x_MF, approximate="tanh" if tanh else "none")
    dx_MF = dx_fp32_MF.to(h_MF.dtype)
    return dx_MF, *quantize_rows(dx_MF), dx_fp32_MF.sum(0)


@bias_gelu8.register_fake
def _(h_MF: Tensor, bias_F: Tensor, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(h_MF),
        torch.empty_like(h_MF, dtype=FP8_DTYPE),
        h_MF.new_empty(len(h_MF), 1, dtype=torch.float32),
    )


@bias_gelu8_backward.register_fake
def _(dy_MF: Tensor, h_MF: Tensor, bias_F: Tensor, tanh: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale_M1, sums_F = (h_MF.new_empty(size, dtype=torch.float32) for size in ((len(h_MF), 1), (h_MF.shape[1],)))
    return torch.empty_like(h_MF), torch.empty_like(h_MF, dtype=FP8_DTYPE), scale_M1, sums_F


# The kernels. A program holds one full row in registers, so the row's maximum is known before anything is written. Of P
# programs, program i processes the rows i, i + P, i + 2P ..., so that together they read memory sequentially.

LIMITS = {"MIN_ROW_MAX": MIN_ROW_MAX, "FP8_MAX": torch.finfo(FP8_DTYPE).max}
COLUMNS_PER_THREAD = 16
"""Columns per thread, which determines the number of warps."""
PROGRAMS = 2112
BACKWARD_PROGRAMS = 264
"""Programs of the forward and of the backward pass, where each also writes one row of partial column sums."""
VECTOR = tl.constexpr(8)
"""Adjacent columns per thread: one bf16 vector load; fp8 uses the same number to avoid a layout conversion."""


@triton.jit
def _nan_max(a, b):  # type: ignore[no-untyped-def]
    """Maximum that propagates NaN: a row with a NaN must not look finite."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit  # type: ignore[untyped-decorator]
def _row_scale(row, MIN_ROW_MAX: tl.constexpr, FP8_MAX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the row's largest magnitude divided by the largest fp8 number, as `quantize_rows` does."""
    return tl.div_rn(_nan_max(tl.reduce(tl.abs(row), 0, _nan_max), MIN_ROW_MAX), FP8_MAX)


@triton.jit  # type: ignore[untyped-decorator]
def _gelu_kernel(  # type: ignore[no-untyped-def]
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
def _gelu_backward_kernel(  # type: ignore[no-untyped-def]
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
def _active_and_slope_kernel(x, SILU: tl.constexpr):  # type: ignore[no-untyped-def]
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
def _gate_kernel(  # type: ignore[no-untyped-def]
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
        active, _ = _active_and_slope_kernel(gate, SILU)
        out = (active * up).to(h.dtype.element_ty).to(tl.float32)
        scale = _row_scale(out, MIN_ROW_MAX, FP8_MAX)
        out8 = (out * tl.div_rn(1.0, scale)).to(y8.dtype.element_ty)
        tl.store(y8 + current_row * width + columns, out8, mask=column_mask)
        tl.store(scales + current_row, scale)


@triton.jit  # type: ignore[untyped-decorator]
def _gate_backward_kernel(  # type: ignore[no-untyped-def]
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
        active, slope = _active_and_slope_kernel(gate, SILU)
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


def _row_options(width: int) -> dict[str, Any]:
    """What all kernels get: the limits of fp8, and the block and the warps that a row needs."""
    block = int(triton.next_power_of_2(width))
    return {**LIMITS, "BLOCK": block, "num_warps": min(max(block // (32 * COLUMNS_PER_THREAD), 1), 32)}


def _run_gelu(h_MF: Tensor, bias_F: Tensor, tanh: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`bias_gelu8` in one kernel; h is contiguous."""
    rows, width = h_MF.shape
    y_MF = torch.empty_like(h_MF)
    y8_MF = torch.empty_like(h_MF, dtype=FP8_DTYPE)
    scale_M1 = torch.empty(rows, 1, device=h_MF.device)
    arguments = h_MF, bias_F, y_MF, y8_MF, scale_M1, rows, width
    _gelu_kernel[(min(PROGRAMS, rows),)](*arguments, TANH=tanh, **_row_options(width))
    return y_MF, y8_MF, scale_M1


def _run_gelu_backward(
    dy_MF: Tensor, h_MF: Tensor, bias_F: Tensor, tanh: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`bias_gelu8_backward` in one kernel; all matrices are contiguous."""
    rows, width = h_MF.shape
    dx_MF = torch.empty_like(h_MF)
    dx8_MF = torch.empty_like(h_MF, dtype=FP8_DTYPE)
    scale_M1 = torch.empty(rows, 1, device=h_MF.device)
    programs = min(BACKWARD_PROGRAMS, rows)
    partial_sums = torch.empty(programs, width, device=h_MF.device)
    arguments = dy_MF, h_MF, bias_F, dx_MF, dx8_MF, scale_M1, partial_sums, rows, width
    _gelu_backward_kernel[(programs,)](*arguments, TANH=tanh, **_row_options(width))
    return dx_MF, dx8_MF, scale_M1, partial_sums.sum(0)


def _run_gate(h_MF: Tensor, silu: bool) -> tuple[Tensor, Tensor]:
    """`gate8` in one kernel; h is contiguous."""
    rows = len(h_MF)
    width = h_MF.shape[1] // 2
    y8_MF = h_MF.new_empty(rows, width, dtype=FP8_DTYPE)
    scale_M1 = torch.empty(rows, 1, device=h_MF.device)
    _gate_kernel[(min(PROGRAMS, rows),)](h_MF, y8_MF, scale_M1, rows, width, SILU=silu, **_row_options(width))
    return y8_MF, scale_M1


def _run_gate_backward(dy_MF: Tensor, h_MF: Tensor, silu: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`gate8_backward` in one kernel; all matrices are contiguous."""
    rows, width = dy_MF.shape
    y_MF = torch.empty_like(dy_MF)
    dh_MF = torch.empty_like(h_MF)
    dh8_MF = torch.empty_like(h_MF, dtype=FP8_DTYPE)
    scale_M1 = torch.empty(rows, 1, device=h_MF.device)
    arguments = dy_MF, h_MF, y_MF, dh_MF, dh8_MF, scale_M1, rows, width
    _gate_backward_kernel[(min(PROGRAMS, rows),)](*arguments, SILU=silu, **_row_options(width))
    return y_MF, dh_MF, dh8_MF, scale_M1
