"""The gradient of a LayerNorm's inputs in one Triton kernel, which adds it to the stream's and sums by column what weights ask for."""

from __future__ import annotations

import torch
from torch import Tensor

from textmill.kernels.column_sums_triton import summed
from textmill.kernels.require_triton import tl, triton

CHUNK, PROGRAMS = 256, 528
"""Columns of a row that a warp has, and the programs in all, each with sums of its own: four for each of an H200's processors."""


@triton.jit
def _both(even, along, more_even, more_along):  # type: ignore[no-untyped-def]
    return even + more_even, along + more_along


@triton.jit
def _come(dy, x, stream, means, spreads, row, rows, columns, width):  # type: ignore[no-untyped-def]
    """A row as it lies in memory."""
    here, at = (columns < width) & (row < rows), row * width + columns
    slope, values = tl.load(dy + at, mask=here, other=0.0), tl.load(x + at, mask=here, other=0.0)
    mean, spread = tl.load(means + row, mask=row < rows, other=0.0), tl.load(spreads + row, mask=row < rows, other=0.0)
    return slope, values, tl.load(stream + at, mask=here, other=0.0), mean, spread


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    dy, x, means, spreads, weight, stream, dx, sums, rows, width, BIASES: tl.constexpr, C: tl.constexpr
):
    """Programs take turns row by row, so that together they go through memory from its beginning to its end."""
    columns = tl.arange(0, C)
    inside = columns < width
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    scales = tl.zeros([C], tl.float32)
    shifts = tl.zeros([C], tl.float32)
    befores = tl.zeros([C], tl.float32)
    afters = tl.zeros([C], tl.float32)
    row = tl.program_id(0).to(tl.int64)
    dy_now, x_now, stream_now, mean, spread = _come(dy, x, stream, means, spreads, row, rows, columns, width)
    for _ in range(tl.program_id(0), rows, tl.num_programs(0)):
        slope, values, passed = dy_now.to(tl.float32), x_now.to(tl.float32), stream_now.to(tl.float32)
        at, lower, spread_now = row * width + columns, mean * spread, spread
        row += tl.num_programs(0)  # the next is on its way while this one is worked on
        dy_now, x_now, stream_now, mean, spread = _come(dy, x, stream, means, spreads, row, rows, columns, width)
        normed, scaled = values * spread_now - lower, slope * scale
        even, along = tl.reduce((scaled, scaled * normed), 0, _both)
        share = spread_now / width  # a division for the row, none for its numbers
        out = passed + scaled * spread_now - even * share - normed * (along * share)
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=inside)
        scales += slope * normed
        shifts += slope
        if BIASES:
            befores += out
            afters += passed
    own = sums + tl.program_id(0) * ((2 + 2 * BIASES) * width) + columns
    tl.store(own, scales, mask=inside)
    tl.store(own + width, shifts, mask=inside)
    if BIASES:
        tl.store(own + 2 * width, befores, mask=inside)
        tl.store(own + 3 * width, afters, mask=inside)


def backward(
    dy_ME: Tensor, x_ME: Tensor, means_M: Tensor, spreads_M: Tensor, weight_E: Tensor, stream_ME: Tensor, biases: bool
) -> tuple[Tensor, Tensor]:
    """As norms_torch's op has it; all matrices without gaps."""
    rows, width = x_ME.shape
    dx_ME, programs = torch.empty_like(x_ME), min(PROGRAMS, rows)
    sums = torch.empty(programs, 4 if biases else 2, width, device=x_ME.device)
    given = dy_ME, x_ME, means_M, spreads_M, weight_E, stream_ME, dx_ME, sums, rows, width
    columns = triton.next_power_of_2(width)
    _backward[(programs,)](*given, BIASES=biases, C=columns, num_warps=min(32, max(1, columns // CHUNK)))
    return dx_ME, summed(sums.flatten(1)).view(-1, width)
