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

from textmill.kernels.availability import can_run_kernels
from textmill.kernels.matmul_torch import matmul_to_dtype

try:
    from textmill.kernels import gelu_fp8_triton
except ImportError:  # Triton kernels cannot be built here
    gelu_fp8_triton = None  # type: ignore[assignment]

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
    if gelu_fp8_triton is not None and can_run_kernels(h_MF):
        return gelu_fp8_triton.gate_forward(h_MF, silu, FP8_DTYPE, MIN_ROW_MAX)
    gate_MF, up_MF = h_MF.float().chunk(2, 1)
    return quantize_rows((_active_and_slope(gate_MF, silu)[0] * up_MF).to(h_MF.dtype))


@torch.library.custom_op("textmill::gate8_backward", mutates_args=())
def gate8_backward(dy_MF: Tensor, h_MF: Tensor, silu: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The product again, in h's precision; the gradient of h, in h's precision and in fp8 with the rows' scales."""
    if gelu_fp8_triton is not None and can_run_kernels(h_MF):
        return gelu_fp8_triton.gate_backward(dy_MF, h_MF, silu, FP8_DTYPE, MIN_ROW_MAX)
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
    if gelu_fp8_triton is not None and can_run_kernels(h_MF):
        return gelu_fp8_triton.forward(h_MF, bias_F, tanh, FP8_DTYPE, MIN_ROW_MAX)
    y_MF = F.gelu(h_MF.float() + bias_F.float(), approximate="tanh" if tanh else "none").to(h_MF.dtype)
    return y_MF, *quantize_rows(y_MF)


@torch.library.custom_op("textmill::bias_gelu8_backward", mutates_args=())
def bias_gelu8_backward(
    dy_MF: Tensor, h_MF: Tensor, bias_F: Tensor, tanh: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of h, in h's precision and in fp8 with the rows' scales, and the gradient of the bias in fp32."""
    if gelu_fp8_triton is not None and can_run_kernels(h_MF):
        return gelu_fp8_triton.backward(dy_MF, h_MF, bias_F, tanh, FP8_DTYPE, MIN_ROW_MAX)
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
