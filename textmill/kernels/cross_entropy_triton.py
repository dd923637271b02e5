"""The cross-entropy of a piece of logits in one Triton kernel: losses out, the gradient written over the logits.

The kernel is bound by its instructions before it is by memory, so the loops hold as few as can be: exponentials of base 2, a lane's
greatest score found over eight columns at once, masks in the last block alone, the label's own entry mended after the walk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from textmill.kernels.require_triton import tl, triton

LANES, WARPS = 1024, 32
"""Lanes of a block, eight columns each, and the warps that walk a row; fewer of both for a small vocabulary."""
LOW = tl.constexpr(-1e30)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _walked(x, tops, totals):  # type: ignore[no-untyped-def]
    """Greatest scores and sums of powers of two of each lane, a block further."""
    higher = tl.maximum(tops, tl.max(x, 1))
    totals = totals * tl.exp2((tops - higher) * LOG2E) + tl.sum(tl.exp2(x * LOG2E - (higher * LOG2E)[:, None]), 1)
    return higher, totals


@triton.jit  # type: ignore[untyped-decorator]
def _slope(start, places, whole, lower, even, SIGN: tl.constexpr, SMOOTH: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the gradient over the scores of the blocks that have no mask."""
    for first in range(0, whole, ROWS * 8):
        slope = SIGN * tl.exp2(
            tl.load(start + first + places, eviction_policy="evict_first").to(tl.float32) * LOG2E - lower
        )
        if SMOOTH:
            slope -= even
        tl.store(start + first + places, slope.to(start.dtype.element_ty), eviction_policy="evict_first")


@triton.jit  # type: ignore[untyped-decorator]
def _grade(  # type: ignore[no-untyped-def]
    logits, labels, shares, losses, right, vocab, padded, smoothing, z,
    GRADIENT: tl.constexpr, SMOOTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One row: its greatest score and sum of exponentials in one walk, the gradient (or the argmax) in a second, from the cache."""
    row = tl.program_id(0).to(tl.int64)
    label, start = tl.load(labels + row), logits + row * padded
    places = tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    whole = vocab // (ROWS * 8) * (ROWS * 8)
    tops, totals, plains = tl.full([ROWS], LOW, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for first in range(0, whole, ROWS * 8):
        x = tl.load(start + first + places, eviction_policy="evict_last").to(tl.float32)
        tops, totals = _walked(x, tops, totals)
        if SMOOTH:
            plains += tl.sum(x, 1)
    # Loads are masked by the padded width, which keeps them wide; the real vocabulary is masked in registers.
    columns = whole + places
    last = tl.load(start + columns, mask=columns < padded, other=0.0).to(tl.float32)
    tops, totals = _walked(tl.where(columns < vocab, last, -float("inf")), tops, totals)
    if SMOOTH:
        plains += tl.sum(tl.where(columns < vocab, last, 0.0), 1)
    top = tl.max(tops)
    spread = top * LOG2E + tl.log2(tl.sum(totals * tl.exp2((tops - top) * LOG2E)))
    asked = label >= 0
    picked = tl.load(start + tl.where(asked, label, 0)).to(tl.float32)
    nats = spread * LN2
    loss = nats - ((1 - smoothing) * picked + smoothing * tl.sum(plains) / vocab) + z * nats * nats
    tl.store(losses + row, tl.where(asked, loss, 0.0))
    if GRADIENT:
        share = tl.where(asked, tl.load(shares + row), 0.0)
        # What a row weighs goes into the exponent; nothing asked is 2 to the minus infinity.
        weight, even = share * (1 + 2 * z * nats), share * smoothing / vocab
        lower, sign = spread - tl.log2(tl.abs(weight)), tl.where(weight < 0, -1.0, 1.0)
        own = sign * tl.exp2(picked * LOG2E - lower) - even - share * (1 - smoothing)
        slope = tl.where(columns < vocab, sign * tl.exp2(last * LOG2E - lower) - even, 0.0)
        tl.debug_barrier()  # every thread has read the label's score
        tl.store(start + columns, slope.to(logits.dtype.element_ty), mask=columns < padded)
        for first in range(whole + ROWS * 8, padded, ROWS * 8):
            tl.store(start + first + places, tl.zeros([ROWS, 8], logits.dtype.element_ty), mask=first + places < padded)
        if weight < 0:  # a log of the denominator so low that its square pulls it up
            _slope(start, places, whole, lower, even, -1.0, SMOOTH, ROWS)
        else:
            _slope(start, places, whole, lower, even, 1.0, SMOOTH, ROWS)
        tl.debug_barrier()  # the label's entry is written last
        tl.store(start + tl.where(asked, label, 0), own.to(logits.dtype.element_ty), mask=asked)
    else:
        best = padded
        for first in range(0, padded, ROWS * 8):
            columns = first + places
            x = tl.load(start + columns, mask=columns < padded, other=0.0).to(tl.float32)
            best = tl.minimum(best, tl.min(tl.where((columns < vocab) & (x == top), columns, padded)))
        tl.store(right + row, (best == label).to(tl.int32))


def grade(logits_MV: Tensor, labels_M: Tensor, shares_M: Tensor, vocab: int, smoothing: float, z: float) -> Tensor:
    """The loss of each row, 0 where nothing is asked; the logits become the gradient of losses times shares, none below 0."""
    losses_M = torch.empty(len(logits_MV), device=logits_MV.device)
    _run(logits_MV, labels_M, shares_M, losses_M, labels_M, vocab, smoothing, z, gradient=True)
    return losses_M


def score(logits_MV: Tensor, labels_M: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """The loss of each row and whether its highest score is the label's; the logits stay."""
    losses_M = torch.empty(len(logits_MV), device=logits_MV.device)
    right_M = torch.empty(len(logits_MV), dtype=torch.int32, device=logits_MV.device)
    _run(logits_MV, labels_M, losses_M, losses_M, right_M, vocab, 0.0, 0.0, gradient=False)
    return losses_M, right_M


def _run(
    logits_MV: Tensor, labels_M: Tensor, shares_M: Tensor, losses_M: Tensor, right_M: Tensor, vocab: int, smoothing: float, z: float,
    *, gradient: bool,
) -> None:  # fmt: skip
    rows, padded = logits_MV.shape
    lanes = min(LANES, triton.next_power_of_2(triton.cdiv(padded, 8)))
    _grade[(rows,)](
        logits_MV, labels_M, shares_M, losses_M, right_M, vocab, padded, smoothing, z,
        GRADIENT=gradient, SMOOTH=smoothing > 0, ROWS=lanes, num_warps=max(1, min(WARPS, lanes // 32)),
    )  # fmt: skip
