"""Bias + GELU in one Triton kernel, and its backward pass, which also sums the bias gradient, in another."""

from __future__ import annotations

import torch
from torch import Tensor

from textmill.kernels.triton_support import libdevice, tl, triton

COLUMNS = 512
ROWS = 4
WARPS = 4
"""Columns per program, rows per iteration, and warps."""
PROGRAMS = 264
"""Programs along the rows in the backward pass; each keeps its own column sums."""


@triton.jit  # type: ignore[untyped-decorator]
def phi_and_derivative(x, TANH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Phi(x), in the tanh form (written as a logistic function) or with erf, and its derivative.

    The fast exponential and division flush denormals to 0: fewer instructions, no visible effect on the result."""
    if TANH:
        x2 = x * x
        phi = libdevice.fast_dividef(1.0, 1 + libdevice.exp2(x * (-2.302208198144325 - 0.10294323460696038 * x2)))
        derivative = phi * (1 - phi) * (1.5957691216057308 + 0.2140644384766067 * x2)
    else:
        phi = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)
        derivative = 0.3989422804014327 * libdevice.exp2(-0.7213475204444817 * x * x)
    return phi, derivative


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def]
    x, bias, y, rows, width, TANH: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    columns = tl.program_id(1) * C + tl.arange(0, C)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    inside = (columns < width)[None, :] & (row < rows)[:, None]
    at = row[:, None] * width + columns[None, :]
    given = tl.load(bias + columns, mask=columns < width, other=0.0).to(tl.float32)
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + given[None, :]
    phi, _ = phi_and_derivative(values, TANH)
    tl.store(y + at, (values * phi).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _load_rows(x, dy, row, rows, columns, width):  # type: ignore[no-untyped-def]
    """Load rows of x and dy."""
    valid = (row < rows)[:, None] & (columns < width)[None, :]
    at = row[:, None] * width + columns[None, :]
    return tl.load(x + at, mask=valid, other=0.0), tl.load(dy + at, mask=valid, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    x, bias, dy, dx, sums, rows, width, TANH: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """Programs interleave rows, so that together they read memory from start to end."""
    columns = tl.program_id(1) * C + tl.arange(0, C)
    inside = columns < width
    given = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([R, C], tl.float32)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    x_now, dy_now = _load_rows(x, dy, row, rows, columns, width)
    for _ in range(tl.program_id(0) * R, rows, tl.num_programs(0) * R):
        values = x_now.to(tl.float32) + given[None, :]
        upstream = dy_now.to(tl.float32)
        valid = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * width + columns[None, :]
        row += tl.num_programs(0) * R  # prefetch the next rows
        x_now, dy_now = _load_rows(x, dy, row, rows, columns, width)
        phi, derivative = phi_and_derivative(values, TANH)
        out = upstream * (phi + values * derivative)
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=valid)
        total += out
    tl.store(sums + tl.program_id(0) * width + columns, tl.sum(total, 0), mask=inside)


@torch.library.custom_op("textmill::bias_gelu", mutates_args=())
def bias_gelu(x_MF: Tensor, bias_F: Tensor, tanh: bool) -> Tensor:
    """GELU of x + bias."""
    y_MF = torch.empty_like(x_MF)
    rows, width = x_MF.shape
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(width, COLUMNS))
    _forward[grid](x_MF, bias_F, y_MF, rows, width, TANH=tanh, R=ROWS, C=COLUMNS, num_warps=WARPS)
    return y_MF


@torch.library.custom_op("textmill::bias_gelu_backward", mutates_args=())
def bias_gelu_backward(dy_MF: Tensor, x_MF: Tensor, bias_F: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the bias; the latter in fp32."""
    dx_MF = torch.empty_like(x_MF)
    rows, width = x_MF.shape
    programs = min(PROGRAMS, triton.cdiv(rows, ROWS))
    sums = torch.empty(programs, width, device=x_MF.device)
    grid = (programs, triton.cdiv(width, COLUMNS))
    _backward[grid](x_MF, bias_F, dy_MF, dx_MF, sums, rows, width, TANH=tanh, R=ROWS, C=COLUMNS, num_warps=WARPS)
    return dx_MF, sums.sum(0)


@bias_gelu.register_fake
def _(x_MF: Tensor, bias_F: Tensor, tanh: bool) -> Tensor:
    return torch.empty_like(x_MF)


@bias_gelu_backward.register_fake
def _(dy_MF: Tensor, x_MF: Tensor, bias_F: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_MF), torch.empty(x_MF.shape[1], device=x_MF.device)


def _save_inputs(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x_MF, bias_F, ctx.tanh = inputs
    ctx.save_for_backward(x_MF, bias_F)


def _autograd_backward(ctx, dy_MF: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
    x_MF, bias_F = ctx.saved_tensors
    dx_MF, sums_F = bias_gelu_backward(dy_MF.contiguous(), x_MF, bias_F, ctx.tanh)
    return dx_MF, sums_F.to(bias_F.dtype), None


bias_gelu.register_autograd(_autograd_backward, setup_context=_save_inputs)
