"""LayerNorm backward in one Triton kernel: adds the residual gradient and sums the gradients of weights and biases."""

from __future__ import annotations

import torch
from torch import Tensor

from textmill.kernels.column_sums_triton import column_sums
from textmill.kernels.require_triton import tl, triton

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
def _backward(  # type: ignore[no-untyped-def]
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


def backward(
    dy_ME: Tensor,
    x_ME: Tensor,
    means_M: Tensor,
    inverse_stds_M: Tensor,
    weight_E: Tensor,
    stream_ME: Tensor,
    biases: bool,
) -> tuple[Tensor, Tensor]:
    """The Triton version of norms_torch.norm_backward; all matrices are contiguous."""
    rows, width = x_ME.shape
    dx_ME = torch.empty_like(x_ME)
    programs = min(PROGRAMS, rows)
    sums = torch.empty(programs, 4 if biases else 2, width, device=x_ME.device)
    given = dy_ME, x_ME, means_M, inverse_stds_M, weight_E, stream_ME, dx_ME, sums, rows, width
    columns = triton.next_power_of_2(width)
    _backward[(programs,)](*given, BIASES=biases, C=columns, num_warps=min(32, max(1, columns // CHUNK)))
    return dx_ME, column_sums(sums.flatten(1)).view(-1, width)
