"""The gradient of a LayerNorm's inputs in one Triton kernel, which adds it to the stream's and sums by column what weights ask for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, WARPS = 2, 8
"""Rows that a program takes at a time, and its warps."""
PROGRAMS = 528
"""Programs in all, each with sums of its own: four for each of an H200's processors."""


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    dy, x, means, spreads, weight, stream, dx, sums, rows, width, each, BIASES: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    columns = tl.arange(0, C)
    inside = columns < width
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(0).to(tl.int64) * each
    scales = tl.zeros([R, C], tl.float32)
    shifts = tl.zeros([R, C], tl.float32)
    befores = tl.zeros([R, C], tl.float32)
    afters = tl.zeros([R, C], tl.float32)
    for start in range(0, each, R):
        row = first + start + tl.arange(0, R)
        there = (row < rows) & (row < first + each)
        here = there[:, None] & inside[None, :]
        at = row[:, None] * width + columns[None, :]
        slope = tl.load(dy + at, mask=here, other=0.0).to(tl.float32)
        values = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
        passed = tl.load(stream + at, mask=here, other=0.0).to(tl.float32)
        spread = tl.load(spreads + row, mask=there, other=0.0)[:, None]
        normed = (values - tl.load(means + row, mask=there, other=0.0)[:, None]) * spread
        scaled = slope * scale[None, :]
        even, along = tl.sum(scaled, 1)[:, None] / width, tl.sum(scaled * normed, 1)[:, None] / width
        out = (passed + spread * (scaled - even - normed * along)).to(dx.dtype.element_ty)
        tl.store(dx + at, out, mask=here)
        scales += slope * normed
        shifts += slope
        if BIASES:
            befores += out.to(tl.float32)
            afters += passed
    own = sums + tl.program_id(0) * ((2 + 2 * BIASES) * width) + columns
    tl.store(own, tl.sum(scales, 0), mask=inside)
    tl.store(own + width, tl.sum(shifts, 0), mask=inside)
    if BIASES:
        tl.store(own + 2 * width, tl.sum(befores, 0), mask=inside)
        tl.store(own + 3 * width, tl.sum(afters, 0), mask=inside)


def backward(
    dy_ME: Tensor, x_ME: Tensor, means_M: Tensor, spreads_M: Tensor, weight_E: Tensor, stream_ME: Tensor, biases: bool
) -> tuple[Tensor, Tensor]:
    """As norms_torch's op has it; all matrices without gaps."""
    rows, width = x_ME.shape
    dx_ME = torch.empty_like(x_ME)
    programs = min(PROGRAMS, triton.cdiv(rows, ROWS))
    sums = torch.empty(programs, 4 if biases else 2, width, device=x_ME.device)
    given = dy_ME, x_ME, means_M, spreads_M, weight_E, stream_ME, dx_ME, sums, rows, width, triton.cdiv(rows, programs)
    _backward[(programs,)](*given, BIASES=biases, R=ROWS, C=triton.next_power_of_2(width), num_warps=WARPS)
    return dx_ME, sums.sum(0)
