"""Gradients of queries, keys and values joined by one Triton kernel, which sums those of their bias on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, ROWS, WARPS = 256, 8, 4
"""A program's columns of each of the three, the tokens it takes at a time, and its warps."""
PROGRAMS = 660
"""Programs in all, each with sums of its own: as many as an H200 holds at a time, so that they end together."""


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    dq, dk, dv, out, sums, rows, tokens, width, each, qn, qh, qt, qd, kn, kh, kt, kd, vn, vh, vt, vd,
    D: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(1) * C + tl.arange(0, C)
    h, d = columns // D, columns % D
    place = h * (3 * D) + d
    first = tl.program_id(0).to(tl.int64) * each
    total_q = tl.zeros([R, C], tl.float32)
    total_k = tl.zeros([R, C], tl.float32)
    total_v = tl.zeros([R, C], tl.float32)
    for start in range(0, each, R):
        row = first + start + tl.arange(0, R)
        inside = (columns < width)[None, :] & ((row < rows) & (row < first + each))[:, None]
        n, t = row // tokens, row % tokens
        q = tl.load(dq + (n * qn + t * qt)[:, None] + (h * qh + d * qd)[None, :], mask=inside, other=0.0)
        k = tl.load(dk + (n * kn + t * kt)[:, None] + (h * kh + d * kd)[None, :], mask=inside, other=0.0)
        v = tl.load(dv + (n * vn + t * vt)[:, None] + (h * vh + d * vd)[None, :], mask=inside, other=0.0)
        at = row[:, None] * (3 * width) + place[None, :]
        tl.store(out + at, q, mask=inside)
        tl.store(out + at + D, k, mask=inside)
        tl.store(out + at + 2 * D, v, mask=inside)
        total_q += q.to(tl.float32)
        total_k += k.to(tl.float32)
        total_v += v.to(tl.float32)
    own = sums + tl.program_id(0) * (3 * width) + place
    tl.store(own, tl.sum(total_q, 0), mask=columns < width)
    tl.store(own + D, tl.sum(total_k, 0), mask=columns < width)
    tl.store(own + 2 * D, tl.sum(total_v, 0), mask=columns < width)


def joined(dq_NHTD: Tensor, dk_NHTD: Tensor, dv_NHTD: Tensor) -> tuple[Tensor, Tensor]:
    """Those of the projection's outputs [tokens, heads x 3 x head width], however the three lie in memory, and their sums in fp32."""
    N, H, T, D = dq_NHTD.shape
    rows, width = N * T, H * D
    out = dq_NHTD.new_empty(rows, 3 * width)
    blocks = triton.cdiv(width, COLUMNS)
    programs = min(max(1, PROGRAMS // blocks), triton.cdiv(rows, ROWS))
    sums = torch.empty(programs, 3 * width, device=out.device)
    each = triton.cdiv(rows, programs)
    strides = *dq_NHTD.stride(), *dk_NHTD.stride(), *dv_NHTD.stride()
    given = dq_NHTD, dk_NHTD, dv_NHTD, out, sums, rows, T, width, each, *strides
    _join[programs, blocks](*given, D=D, R=ROWS, C=COLUMNS, num_warps=WARPS)
    return out, sums.sum(0)
