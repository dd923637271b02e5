"""The next token of each text in a few small Triton kernels: greedy, or sampled with temperature and top-k."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from textmill.kernels.triton_support import tl, triton

PROGRAMS = 1024
PARTS = 256
BLOCK = 512
"""Programs for all texts, most programs per text, and logits per iteration."""


@triton.jit  # type: ignore[untyped-decorator]
def _find_maximum(  # type: ignore[no-untyped-def]
    logits, banned, maxima, ids, not_finite, stride, vocab, each, K: tl.constexpr, B: tl.constexpr
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    best = tl.full((B,), float("-inf"), tl.float32)
    where = tl.full((B,), 2147483647, tl.int32)
    bad = tl.zeros((B,), tl.int32)
    for start in range(part * each, tl.minimum(vocab, (part + 1) * each), B):
        columns = start + tl.arange(0, B)
        inside = columns < tl.minimum(vocab, (part + 1) * each)
        values = tl.load(logits + row.to(tl.int64) * stride + columns, mask=inside, other=0.0).to(tl.float32)
        bad |= tl.where(tl.abs(values) < float("inf"), 0, 1)
        allowed = inside
        for number in tl.static_range(K):
            allowed &= columns != tl.load(banned + row * K + number).to(tl.int32)
        better = allowed & ((values > best) | (where == 2147483647))
        best = tl.where(better, values, best)
        where = tl.where(better, columns, where)
    top = tl.max(best, 0)
    at = row * tl.num_programs(1) + part
    tl.store(maxima + at, top)
    tl.store(ids + at, tl.min(tl.where(best == top, where, 2147483647), 0))
    tl.store(not_finite + at, tl.max(bad, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _first_of_largest(maxima, ids, not_finite, out, P: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = row * P + tl.arange(0, P)
    found = tl.load(maxima + at)
    first = tl.min(tl.where(found == tl.max(found, 0), tl.load(ids + at), 2147483647), 0)
    tl.store(out + row, tl.where(tl.max(tl.load(not_finite + at), 0) == 0, first, -1).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _weights(  # type: ignore[no-untyped-def]
    at, columns, inside, banned, row, top, temperature, threshold, K: tl.constexpr
):
    """Unnormalised probabilities of some logits in fp64; 0 if the id is banned or the logit is below the threshold."""
    values = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32)
    # A plain / rounds differently from torch, which computed the threshold.
    scaled = tl.div_rn(values - top, temperature)
    allowed = inside & (scaled >= threshold)
    for number in tl.static_range(K):
        allowed &= columns != tl.load(banned + row * K + number).to(tl.int32)
    exact = tl.where(temperature == 1.0, values.to(tl.float64) - top.to(tl.float64), scaled.to(tl.float64))
    return tl.where(allowed, tl.exp(exact), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_weights(  # type: ignore[no-untyped-def]
    logits,
    banned,
    maxima,
    temperatures,
    thresholds,
    sums,
    stride,
    vocab,
    each,
    K: tl.constexpr,
    B: tl.constexpr,
    P: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    top = tl.max(tl.load(maxima + row * P + tl.arange(0, P)), 0)
    temperature = tl.load(temperatures + row)
    threshold = tl.load(thresholds + row)
    total = tl.zeros((B,), tl.float64)
    for start in range(part * each, tl.minimum(vocab, (part + 1) * each), B):
        columns = start + tl.arange(0, B)
        inside = columns < tl.minimum(vocab, (part + 1) * each)
        total += _weights(
            logits + row.to(tl.int64) * stride, columns, inside, banned, row, top, temperature, threshold, K
        )
    tl.store(sums + row * P + part, tl.sum(total, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _pick(  # type: ignore[no-untyped-def]
    logits,
    banned,
    maxima,
    not_finite,
    temperatures,
    thresholds,
    sums,
    uniforms,
    out,
    stride,
    vocab,
    each,
    K: tl.constexpr,
    B: tl.constexpr,
    P: tl.constexpr,
):
    row = tl.program_id(0)
    parts = tl.arange(0, P)
    top = tl.max(tl.load(maxima + row * P + parts), 0)
    temperature = tl.load(temperatures + row)
    threshold = tl.load(thresholds + row)
    masses = tl.load(sums + row * P + parts)
    ends = tl.cumsum(masses, 0)
    point = tl.load(uniforms + row) * tl.sum(masses, 0)
    # The part that the point falls into; if rounding puts it after all, the last part with any probability.
    found = tl.min(tl.where((ends > point) & (masses > 0), parts, P), 0)
    last = tl.max(tl.where(masses > 0, parts, 0), 0)
    part = tl.where(found < P, found, last)
    before = tl.sum(tl.where(parts < part, masses, 0.0), 0)
    chosen = vocab
    heaviest = 0
    for start in range(part * each, tl.minimum(vocab, (part + 1) * each), B):
        columns = start + tl.arange(0, B)
        inside = columns < tl.minimum(vocab, (part + 1) * each)
        weights = _weights(
            logits + row.to(tl.int64) * stride, columns, inside, banned, row, top, temperature, threshold, K
        )
        reached = (before + tl.cumsum(weights, 0) > point) & (weights > 0)
        chosen = tl.minimum(chosen, tl.min(tl.where(reached, columns, vocab), 0))
        heaviest = tl.maximum(heaviest, tl.max(tl.where(weights > 0, columns, 0), 0))
        before += tl.sum(weights, 0)
    id_ = tl.where(chosen < vocab, chosen, heaviest)
    bad = tl.max(tl.load(not_finite + row * P + parts), 0)
    tl.store(out + row, tl.where(bad == 0, id_, -1).to(tl.int64))


def greedy_ids(logits_NV: Tensor, banned_NK: Tensor | None) -> Tensor:
    """The first id with the largest logit in each row, without banned ids (-1: none); -1 if a logit is not finite."""
    _, _, (maxima_NP, ids_NP, not_finite_NP) = _find_maxima(logits_NV, banned_NK)
    out_N = logits_NV.new_empty(len(logits_NV), dtype=torch.long)
    _first_of_largest[(len(logits_NV),)](maxima_NP, ids_NP, not_finite_NP, out_N, P=maxima_NP.shape[1], num_warps=1)
    return out_N


def sample_ids(
    logits_NV: Tensor, banned_NK: Tensor | None, temperatures_N: Tensor, kth_N: Tensor | None, uniforms_N: Tensor
) -> Tensor:
    """Sample one id per row by inverting the cumulative distribution at `uniforms_N` (0 to below 1).

    Logits are shifted by the row's maximum and divided by its temperature. Logits below `kth_N` (top-k) and banned ids
    are excluded. -1 if a logit is not finite.
    """
    given, sizes, (maxima_NP, _, not_finite_NP) = _find_maxima(logits_NV, banned_NK)
    thresholds_N = (
        torch.full_like(temperatures_N, -torch.inf) if kth_N is None else (kth_N - maxima_NP.amax(1)) / temperatures_N
    )
    sums_NP = maxima_NP.new_empty(maxima_NP.shape, dtype=torch.float64)
    out_N = logits_NV.new_empty(len(logits_NV), dtype=torch.long)
    _sum_weights[tuple(maxima_NP.shape)](
        *given,
        maxima_NP,
        temperatures_N,
        thresholds_N,
        sums_NP,
        *sizes[0],
        **sizes[1],
        P=maxima_NP.shape[1],
        num_warps=4,
    )
    _pick[(len(logits_NV),)](
        *given,
        maxima_NP,
        not_finite_NP,
        temperatures_N,
        thresholds_N,
        sums_NP,
        uniforms_N,
        out_N,
        *sizes[0],
        **sizes[1],
        P=maxima_NP.shape[1],
        num_warps=4,
    )
    return out_N


def _find_maxima(
    logits_NV: Tensor, banned_NK: Tensor | None
) -> tuple[tuple[Tensor, Tensor], Any, tuple[Tensor, Tensor, Tensor]]:
    """Kernel arguments, their sizes, and for each part of a row: its maximum, the id of that, any non-finite logit."""
    rows, vocab = logits_NV.shape
    assert logits_NV.stride(1) == 1
    parts = min(PARTS, triton.next_power_of_2(max(1, PROGRAMS // rows) + 1) // 2)
    maxima_NP = logits_NV.new_empty(rows, parts, dtype=torch.float32)
    ids_NP, not_finite_NP = (logits_NV.new_empty(rows, parts, dtype=torch.int32) for _ in range(2))
    given = logits_NV, logits_NV if banned_NK is None else banned_NK
    sizes = (
        (logits_NV.stride(0), vocab, triton.cdiv(vocab, parts)),
        {"K": 0 if banned_NK is None else banned_NK.shape[1], "B": BLOCK},
    )
    _find_maximum[(rows, parts)](*given, maxima_NP, ids_NP, not_finite_NP, *sizes[0], **sizes[1], num_warps=4)
    return given, sizes, (maxima_NP, ids_NP, not_finite_NP)
