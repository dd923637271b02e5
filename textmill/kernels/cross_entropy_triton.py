"""Cross-entropy of a chunk of logits in one Triton kernel: returns losses, overwrites the logits with their gradient.

The kernel is limited by instructions rather than memory, so its loops are kept short: base-2 exponentials, the maximum
of a lane taken over eight columns at once, masks only in the last block, the label's entry corrected after the loop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from textmill.kernels.triton_support import tl, triton

LANES = 1024
WARPS = 32
"""Lanes of a block (eight columns each) and warps per row; fewer of both for a small vocabulary."""
LOW = tl.constexpr(-1e30)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _running_log_sum(x, maxima, totals):  # type: ignore[no-untyped-def]
    """Update each lane's running maximum and sum of exponentials with one more block."""
    higher = tl.maximum(maxima, tl.max(x, 1))
    totals = totals * tl.exp2((maxima - higher) * LOG2E) + tl.sum(tl.exp2(x * LOG2E - (higher * LOG2E)[:, None]), 1)
    return higher, totals


@triton.jit  # type: ignore[untyped-decorator]
def _write_gradient(  # type: ignore[no-untyped-def]
    start, offsets, unmasked, lower, smoothed, SMOOTH: tl.constexpr, ROWS: tl.constexpr
):
    """Overwrite the logits of the unmasked blocks with their gradient."""
    for first in range(0, unmasked, ROWS * 8):
        gradient_block = tl.exp2(
            tl.load(start + first + offsets, eviction_policy="evict_first").to(tl.float32) * LOG2E - lower
        )
        if SMOOTH:
            gradient_block -= smoothed
        tl.store(start + first + offsets, gradient_block.to(start.dtype.element_ty), eviction_policy="evict_first")


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits,
    labels,
    weights,
    losses,
    correct,
    vocab,
    padded,
    smoothing,
    GRADIENT: tl.constexpr,
    SMOOTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One row: log-sum-exp in a first pass, the gradient (or the argmax) in a second pass that reads from the cache."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    start = logits + row * padded
    offsets = tl.arange(0, ROWS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    unmasked = vocab // (ROWS * 8) * (ROWS * 8)
    maxima = tl.full([ROWS], LOW, tl.float32)
    totals = tl.zeros([ROWS], tl.float32)
    logit_sums = tl.zeros([ROWS], tl.float32)
    for first in range(0, unmasked, ROWS * 8):
        x = tl.load(start + first + offsets, eviction_policy="evict_last").to(tl.float32)
        maxima, totals = _running_log_sum(x, maxima, totals)
        if SMOOTH:
            logit_sums += tl.sum(x, 1)
    # Loads are masked by the padded width, which keeps them wide; the real vocabulary is masked in registers.
    columns = unmasked + offsets
    last = tl.load(start + columns, mask=columns < padded, other=0.0).to(tl.float32)
    maxima, totals = _running_log_sum(tl.where(columns < vocab, last, -float("inf")), maxima, totals)
    if SMOOTH:
        logit_sums += tl.sum(tl.where(columns < vocab, last, 0.0), 1)
    top = tl.max(maxima)
    log2_sum = top * LOG2E + tl.log2(tl.sum(totals * tl.exp2((maxima - top) * LOG2E)))
    has_loss = label >= 0
    label_logit = tl.load(start + tl.where(has_loss, label, 0)).to(tl.float32)
    nats = log2_sum * LN2
    loss = nats - ((1 - smoothing) * label_logit + smoothing * tl.sum(logit_sums) / vocab)
    tl.store(losses + row, tl.where(has_loss, loss, 0.0))
    if GRADIENT:
        weight = tl.where(has_loss, tl.load(weights + row), 0.0)
        smoothed = weight * smoothing / vocab
        # The row's weight goes into the exponent; a row without loss gets 2 to the minus infinity.
        lower = log2_sum - tl.log2(weight)
        own = tl.exp2(label_logit * LOG2E - lower) - smoothed - weight * (1 - smoothing)
        gradient_block = tl.where(columns < vocab, tl.exp2(last * LOG2E - lower) - smoothed, 0.0)
        tl.debug_barrier()  # every thread has read the label's logit
        tl.store(start + columns, gradient_block.to(logits.dtype.element_ty), mask=columns < padded)
        for first in range(unmasked + ROWS * 8, padded, ROWS * 8):
            tl.store(
                start + first + offsets, tl.zeros([ROWS, 8], logits.dtype.element_ty), mask=first + offsets < padded
            )
        _write_gradient(start, offsets, unmasked, lower, smoothed, SMOOTH, ROWS)
        tl.debug_barrier()  # the label's entry is written last
        tl.store(start + tl.where(has_loss, label, 0), own.to(logits.dtype.element_ty), mask=has_loss)
    else:
        best = padded
        for first in range(0, padded, ROWS * 8):
            columns = first + offsets
            x = tl.load(start + columns, mask=columns < padded, other=0.0).to(tl.float32)
            best = tl.minimum(best, tl.min(tl.where((columns < vocab) & (x == top), columns, padded)))
        tl.store(correct + row, (best == label).to(tl.int32))


def cross_entropy_with_gradient(
    logits_MV: Tensor, labels_M: Tensor, weights_M: Tensor, vocab: int, smoothing: float
) -> Tensor:
    """The loss of each row (0 if the label is negative); the logits become the gradient of sum(losses * weights)."""
    losses_M = torch.empty(len(logits_MV), device=logits_MV.device)
    _run(logits_MV, labels_M, weights_M, losses_M, labels_M, vocab, smoothing, gradient=True)
    return losses_M


def cross_entropy_and_correct(logits_MV: Tensor, labels_M: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """The loss of each row and whether its argmax is the label; leaves the logits unchanged."""
    losses_M = torch.empty(len(logits_MV), device=logits_MV.device)
    correct_M = torch.empty(len(logits_MV), dtype=torch.int32, device=logits_MV.device)
    _run(logits_MV, labels_M, losses_M, losses_M, correct_M, vocab, 0.0, gradient=False)
    return losses_M, correct_M


def _run(
    logits_MV: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    losses_M: Tensor,
    correct_M: Tensor,
    vocab: int,
    smoothing: float,
    *,
    gradient: bool,
) -> None:
    rows, padded = logits_MV.shape
    lanes = min(LANES, triton.next_power_of_2(triton.cdiv(padded, 8)))
    _cross_entropy[(rows,)](
        logits_MV,
        labels_M,
        weights_M,
        losses_M,
        correct_M,
        vocab,
        padded,
        smoothing,
        GRADIENT=gradient,
        SMOOTH=smoothing > 0,
        ROWS=lanes,
        num_warps=max(1, min(WARPS, lanes // 32)),
    )
