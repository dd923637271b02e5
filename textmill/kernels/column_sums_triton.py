"""Column sums of a small matrix in one Triton kernel: adds up the partial sums that another kernel's programs wrote."""

from __future__ import annotations

import torch
from torch import Tensor

from textmill.kernels.require_triton import tl, triton

ROWS = 256
COLUMNS = 32
WARPS = 8
"""Rows that a program reads at a time, its columns, and its warps."""


@triton.jit  # type: ignore[untyped-decorator]
def _sum(parts, out, rows, width, R: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros([R, C], tl.float32)
    for start in range(0, rows, R):
        row = start + tl.arange(0, R)
        total += tl.load(
            parts + row[:, None] * width + columns[None, :],
            mask=(row < rows)[:, None] & (columns < width)[None, :],
            other=0.0,
        )
    tl.store(out + columns, tl.sum(total, 0), mask=columns < width)


def column_sums(parts_PW: Tensor) -> Tensor:
    """The sum over rows of a contiguous fp32 matrix."""
    rows, width = parts_PW.shape
    out_W = torch.empty(width, device=parts_PW.device)
    _sum[(triton.cdiv(width, COLUMNS),)](parts_PW, out_W, rows, width, R=ROWS, C=COLUMNS, num_warps=WARPS)
    return out_W
