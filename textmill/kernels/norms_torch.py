"""LayerNorm with the residual stream for compiled training: one backward pass adds up the gradients of both.

The same pass sums two bias gradients over tokens, because their rows are at hand there: the bias of the layer that
added to the stream before the norm, and of the layer that adds to it after.

Shapes in names: N samples, T tokens, E width, M = N x T.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from textmill.kernels.triton_support import can_run_kernels, tl, triton


def norm_with_residual_gradient(
    x_NTE: Tensor, norm: nn.LayerNorm, before_E: Tensor | None = None, after_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """LayerNorm of the stream, and the stream unchanged. The biases, both or none, only get their gradients here."""
    given = x_NTE, norm.weight, norm.bias, before_E, after_E, norm.eps
    both: tuple[Tensor, Tensor] = _NormAndResidual.apply(*given)  # type: ignore[no-untyped-call]
    return both


class _NormAndResidual(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NTE: Tensor,
        weight_E: Tensor,
        shift_E: Tensor,
        before_E: Tensor | None,
        after_E: Tensor | None,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        x_ME = x_NTE.flatten(0, -2)
        y_ME, means_M1, inverse_stds_M1 = torch.native_layer_norm(
            x_ME.float(), weight_E.shape, weight_E, shift_E, epsilon
        )
        ctx.save_for_backward(x_ME, means_M1.flatten(), inverse_stds_M1.flatten(), weight_E)
        ctx.biases = before_E is not None
        return y_ME.to(x_NTE.dtype).view(x_NTE.shape), x_NTE.view_as(x_NTE)

    @staticmethod
    def backward(ctx: Any, dy_NTE: Tensor, dstream_NTE: Tensor) -> tuple[Tensor | None, ...]:
        dy_ME, dstream_ME = (gradient.contiguous().flatten(0, -2) for gradient in (dy_NTE, dstream_NTE))
        dx_ME, sums = norm_backward(dy_ME, *ctx.saved_tensors, dstream_ME, ctx.biases)
        return (
            dx_ME.view(dy_NTE.shape),
            sums[0],
            sums[1],
            sums[2] if ctx.biases else None,
            sums[3] if ctx.biases else None,
            None,
        )


@torch.library.custom_op("textmill::norm_backward", mutates_args=())
def norm_backward(
    dy_ME: Tensor,
    x_ME: Tensor,
    means_M: Tensor,
    inverse_stds_M: Tensor,
    weight_E: Tensor,
    dstream_ME: Tensor,
    biases: bool,
) -> tuple[Tensor, Tensor]:
    """The gradient of x, with the stream's added; and as fp32 rows those of weight, shift and the two biases."""
    if can_run_kernels(x_ME):
        return _run_backward(dy_ME, x_ME, means_M, inverse_stds_M, weight_E, dstream_ME, biases)
    gradient_ME = dy_ME.float()
    inverse_stds_M1 = inverse_stds_M[:, None]
    normed_ME = (x_ME - means_M[:, None]) * inverse_stds_M1
    scaled_ME = gradient_ME * weight_E
    along_M1 = (scaled_ME * normed_ME).mean(1, keepdim=True)
    dx_ME = (dstream_ME + inverse_stds_M1 * (scaled_ME - scaled_ME.mean(1, keepdim=True) - normed_ME * along_M1)).to(
        x_ME.dtype
    )
    summed = [gradient_ME * normed_ME, gradient_ME, dx_ME, dstream_ME]
    return dx_ME, torch.stack([part.sum(0, dtype=torch.float32) for part in (summed if biases else summed[:2])])


@norm_backward.register_fake
def _(
    dy_ME: Tensor,
    x_ME: Tensor,
    means_M: Tensor,
    inverse_stds_M: Tensor,
    weight_E: Tensor,
    dstream_ME: Tensor,
    biases: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_ME), x_ME.new_empty(4 if biases else 2, x_ME.shape[1], dtype=torch.float32)


CHUNK = 256
PROGRAMS = 528
"""Columns per warp, and the number of programs (four per multiprocessor of an H200), each with its own column sums."""


@triton.jit
def _add_pairs(total, along, more_total, more_along):  # type: ignore[no-untyped-def]
    return total + more_total, along + more_along


@triton.jit
def _load_row(dy, x, stream, means, inverse_stds, row, rows, columns, width):  # type: ignore[no-untyped-def]
    """Load one row of each input."""
    valid = (columns < width) & (row < rows)
    at = row * width + columns
    upstream = tl.load(dy + at, mask=valid, other=0.0)
    values = tl.load(x + at, mask=valid, other=0.0)
    mean = tl.load(means + row, mask=row < rows, other=0.0)
    inverse_std = tl.load(inverse_stds + row, mask=row < rows, other=0.0)
    return upstream, values, tl.load(stream + at, mask=valid, other=0.0), mean, inverse_std


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(  # type: ignore[no-untyped-def]
    dy, x, means, inverse_stds, weight, stream, dx, sums, rows, width, BIASES: tl.constexpr, C: tl.constexpr
):
    """Programs interleave rows, so that together they read memory from start to end."""
    columns = tl.arange(0, C)
    inside = columns < width
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    scales = tl.zeros([C], tl.float32)
    shifts = tl.zeros([C], tl.float32)
    befores = tl.zeros([C], tl.float32)
    afters = tl.zeros([C], tl.float32)
    row = tl.program_id(0).to(tl.int64)
    dy_now, x_now, stream_now, mean, inverse_std = _load_row(
        dy, x, stream, means, inverse_stds, row, rows, columns, width
    )
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        upstream = dy_now.to(tl.float32)
        values = x_now.to(tl.float32)
        residual = stream_now.to(tl.float32)
        at = row * width + columns
        lower = mean * inverse_std
        inverse_std_now = inverse_std
        row += tl.num_programs(0)  # prefetch the next row
        dy_now, x_now, stream_now, mean, inverse_std = _load_row(
            dy, x, stream, means, inverse_stds, row, rows, columns, width
        )
        normed = values * inverse_std_now - lower
        scaled = upstream * scale
        total, along = tl.reduce((scaled, scaled * normed), 0, _add_pairs)
        per_column = inverse_std_now / width  # one division per row instead of one per element
        out = residual + scaled * inverse_std_now - total * per_column - normed * (along * per_column)
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=inside)
        scales += upstream * normed
        shifts += upstream
        if BIASES:
            befores += out
            afters += residual
    own = sums + tl.program_id(0) * ((2 + 2 * BIASES) * width) + columns
    tl.store(own, scales, mask=inside)
    tl.store(own + width, shifts, mask=inside)
    if BIASES:
        tl.store(own + 2 * width, befores, mask=inside)
        tl.store(own + 3 * width, afters, mask=inside)


def _run_backward(
    dy_ME: Tensor,
    x_ME: Tensor,
    means_M: Tensor,
    inverse_stds_M: Tensor,
    weight_E: Tensor,
    stream_ME: Tensor,
    biases: bool,
) -> tuple[Tensor, Tensor]:
    """`norm_backward` in one kernel; all matrices are contiguous."""
    rows, width = x_ME.shape
    dx_ME = torch.empty_like(x_ME)
    programs = min(PROGRAMS, rows)
    sums = torch.empty(programs, 4 if biases else 2, width, device=x_ME.device)
    given = dy_ME, x_ME, means_M, inverse_stds_M, weight_E, stream_ME, dx_ME, sums, rows, width
    columns = triton.next_power_of_2(width)
    _backward_kernel[(programs,)](*given, BIASES=biases, C=columns, num_warps=min(32, max(1, columns // CHUNK)))
    return dx_ME, sums.sum(0)
