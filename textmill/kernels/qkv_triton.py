"""Joins the gradients of queries, keys and values in one Triton kernel, and sums the bias gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from textmill.kernels.column_sums_triton import column_sums
from textmill.kernels.require_triton import tl, triton

COLUMNS = 128
ROWS = 8
WARPS = 4
"""Columns per program (of each of Q, K, V), tokens per iteration, and warps."""
PROGRAMS = 660
"""Number of programs, each with its own sums: as many as an H200 runs at once, so that they end together."""


@triton.jit
def _load_rows(of, row, valid, tokens, h, d, by_n, by_h, by_t, by_d):  # type: ignore[no-untyped-def]
    """Load rows of one of the three, with any strides."""
    return tl.load(
        of + (row // tokens * by_n + row % tokens * by_t)[:, None] + (h * by_h + d * by_d)[None, :],
        mask=valid,
        other=0.0,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    dq,
    dk,
    dv,
    out,
    sums,
    rows,
    tokens,
    width,
    qn,
    qh,
    qt,
    qd,
    kn,
    kh,
    kt,
    kd,
    vn,
    vh,
    vt,
    vd,
    D: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Programs interleave rows, so that together they read memory from start to end."""
    columns = tl.program_id(1) * C + tl.arange(0, C)
    inside = (columns < width)[None, :]
    h = columns // D
    d = columns % D
    target = h * (3 * D) + d
    total_q = tl.zeros([R, C], tl.float32)
    total_k = tl.zeros([R, C], tl.float32)
    total_v = tl.zeros([R, C], tl.float32)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    valid = (row < rows)[:, None] & inside
    q = _load_rows(dq, row, valid, tokens, h, d, qn, qh, qt, qd)
    k = _load_rows(dk, row, valid, tokens, h, d, kn, kh, kt, kd)
    v = _load_rows(dv, row, valid, tokens, h, d, vn, vh, vt, vd)
    for _ in range(tl.program_id(0) * R, rows, tl.num_programs(0) * R):
        q_now = q
        k_now = k
        v_now = v
        valid_now = valid
        at = row[:, None] * (3 * width) + target[None, :]
        row += tl.num_programs(0) * R  # prefetch the next rows
        valid = (row < rows)[:, None] & inside
        q = _load_rows(dq, row, valid, tokens, h, d, qn, qh, qt, qd)
        k = _load_rows(dk, row, valid, tokens, h, d, kn, kh, kt, kd)
        v = _load_rows(dv, row, valid, tokens, h, d, vn, vh, vt, vd)
        tl.store(out + at, q_now, mask=valid_now)
        tl.store(out + at + D, k_now, mask=valid_now)
        tl.store(out + at + 2 * D, v_now, mask=valid_now)
        total_q += q_now.to(tl.float32)
        total_k += k_now.to(tl.float32)
        total_v += v_now.to(tl.float32)
    own = sums + tl.program_id(0) * (3 * width) + target
    tl.store(own, tl.sum(total_q, 0), mask=columns < width)
    tl.store(own + D, tl.sum(total_k, 0), mask=columns < width)
    tl.store(own + 2 * D, tl.sum(total_v, 0), mask=columns < width)


def join_gradients(dq_NHTD: Tensor, dk_NHTD: Tensor, dv_NHTD: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the projection's output [tokens, heads x 3 x head width], and its column sums in fp32."""
    N, H, T, D = dq_NHTD.shape
    rows = N * T
    width = H * D
    out = dq_NHTD.new_empty(rows, 3 * width)
    blocks = triton.cdiv(width, COLUMNS)
    programs = min(max(1, PROGRAMS // blocks), triton.cdiv(rows, ROWS))
    sums = torch.empty(programs, 3 * width, device=out.device)
    strides = *dq_NHTD.stride(), *dk_NHTD.stride(), *dv_NHTD.stride()
    given = dq_NHTD, dk_NHTD, dv_NHTD, out, sums, rows, T, width, *strides
    _join[programs, blocks](*given, D=D, R=ROWS, C=COLUMNS, num_warps=WARPS)
    return out, column_sums(sums)
