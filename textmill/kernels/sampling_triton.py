"""The next token of each text in a few small kernels, which read the scores as they are: the likeliest one, or one that is drawn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from textmill.kernels.require_triton import tl, triton

PROGRAMS, PARTS, BLOCK = 1024, 256, 512
"""Programs that share the scores of all texts, at most so many those of one, and scores that one looks at in one go."""


@triton.jit  # type: ignore[untyped-decorator]
def _search(scores, barred, tops, ids, spoilt, stride, vocab, each, K: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    row, part = tl.program_id(0), tl.program_id(1)
    best, where = tl.full((B,), float("-inf"), tl.float32), tl.full((B,), 2147483647, tl.int32)
    bad = tl.zeros((B,), tl.int32)
    for start in range(part * each, tl.minimum(vocab, (part + 1) * each), B):
        columns = start + tl.arange(0, B)
        inside = columns < tl.minimum(vocab, (part + 1) * each)
        values = tl.load(scores + row.to(tl.int64) * stride + columns, mask=inside, other=0.0).to(tl.float32)
        bad |= tl.where(tl.abs(values) < float("inf"), 0, 1)
        allowed = inside
        for number in tl.static_range(K):
            allowed &= columns != tl.load(barred + row * K + number).to(tl.int32)
        better = allowed & ((values > best) | (where == 2147483647))
        best, where = tl.where(better, values, best), tl.where(better, columns, where)
    top = tl.max(best, 0)
    at = row * tl.num_programs(1) + part
    tl.store(tops + at, top)
    tl.store(ids + at, tl.min(tl.where(best == top, where, 2147483647), 0))
    tl.store(spoilt + at, tl.max(bad, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _settle(tops, ids, spoilt, out, P: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    at = row * P + tl.arange(0, P)
    found = tl.load(tops + at)
    first = tl.min(tl.where(found == tl.max(found, 0), tl.load(ids + at), 2147483647), 0)
    tl.store(out + row, tl.where(tl.max(tl.load(spoilt + at), 0) == 0, first, -1).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _weights(at, columns, inside, barred, row, top, temperature, least, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """What each of some scores weighs in the draw, in double precision; nothing, if it is barred or below the least."""
    values = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32)
    cooled = tl.div_rn(values - top, temperature)  # a plain / rounds otherwise than torch, by which the least is made
    allowed = inside & (cooled >= least)
    for number in tl.static_range(K):
        allowed &= columns != tl.load(barred + row * K + number).to(tl.int32)
    exact = tl.where(temperature == 1.0, values.to(tl.float64) - top.to(tl.float64), cooled.to(tl.float64))
    return tl.where(allowed, tl.exp(exact), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _weigh(  # type: ignore[no-untyped-def]
    scores,
    barred,
    tops,
    temperatures,
    leasts,
    sums,
    stride,
    vocab,
    each,
    K: tl.constexpr,
    B: tl.constexpr,
    P: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    top = tl.max(tl.load(tops + row * P + tl.arange(0, P)), 0)
    temperature, least = tl.load(temperatures + row), tl.load(leasts + row)
    total = tl.zeros((B,), tl.float64)
    for start in range(part * each, tl.minimum(vocab, (part + 1) * each), B):
        columns = start + tl.arange(0, B)
        inside = columns < tl.minimum(vocab, (part + 1) * each)
        total += _weights(scores + row.to(tl.int64) * stride, columns, inside, barred, row, top, temperature, least, K)
    tl.store(sums + row * P + part, tl.sum(total, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _pick(  # type: ignore[no-untyped-def]
    scores, barred, tops, spoilt, temperatures, leasts, sums, uniforms, out, stride, vocab, each,
    K: tl.constexpr, B: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    row, parts = tl.program_id(0), tl.arange(0, P)
    top = tl.max(tl.load(tops + row * P + parts), 0)
    temperature, least = tl.load(temperatures + row), tl.load(leasts + row)
    shares = tl.load(sums + row * P + parts)
    ends = tl.cumsum(shares, 0)
    point = tl.load(uniforms + row) * tl.sum(shares, 0)
    # The part that the point falls into; should rounding put it behind all, the last that weighs anything.
    found = tl.min(tl.where((ends > point) & (shares > 0), parts, P), 0)
    last = tl.max(tl.where(shares > 0, parts, 0), 0)
    part = tl.where(found < P, found, last)
    before = tl.sum(tl.where(parts < part, shares, 0.0), 0)
    chosen, heaviest = vocab, 0
    for start in range(part * each, tl.minimum(vocab, (part + 1) * each), B):
        columns = start + tl.arange(0, B)
        inside = columns < tl.minimum(vocab, (part + 1) * each)
        weights = _weights(scores + row.to(tl.int64) * stride, columns, inside, barred, row, top, temperature, least, K)
        reached = (before + tl.cumsum(weights, 0) > point) & (weights > 0)
        chosen = tl.minimum(chosen, tl.min(tl.where(reached, columns, vocab), 0))
        heaviest = tl.maximum(heaviest, tl.max(tl.where(weights > 0, columns, 0), 0))
        before += tl.sum(weights, 0)
    id_ = tl.where(chosen < vocab, chosen, heaviest)
    bad = tl.max(tl.load(spoilt + row * P + parts), 0)
    tl.store(out + row, tl.where(bad == 0, id_, -1).to(tl.int64))


def likeliest(scores_NV: Tensor, barred_NK: Tensor | None) -> Tensor:
    """Each row's first greatest score, but for those of the ids barred to it (-1: none); -1 where a score is no finite number."""
    _, _, (tops_NP, ids_NP, spoilt_NP) = _searched(scores_NV, barred_NK)
    out_N = scores_NV.new_empty(len(scores_NV), dtype=torch.long)
    _settle[(len(scores_NV),)](tops_NP, ids_NP, spoilt_NP, out_N, P=tops_NP.shape[1], num_warps=1)
    return out_N


def drawn(
    scores_NV: Tensor, barred_NK: Tensor | None, temperatures_N: Tensor, kth_N: Tensor | None, uniforms_N: Tensor
) -> Tensor:
    """The token of each row that a number from 0 to below 1 points at when the probabilities are laid end to end.

    Scores are held against the row's greatest and divided by its temperature; those below that of `kth_N` have no part, nor have barred
    ones; -1 where a score is no finite number.
    """
    given, sizes, (tops_NP, _, spoilt_NP) = _searched(scores_NV, barred_NK)
    leasts_N = (
        torch.full_like(temperatures_N, -torch.inf) if kth_N is None else (kth_N - tops_NP.amax(1)) / temperatures_N
    )
    sums_NP = tops_NP.new_empty(tops_NP.shape, dtype=torch.float64)
    out_N = scores_NV.new_empty(len(scores_NV), dtype=torch.long)
    _weigh[tuple(tops_NP.shape)](
        *given, tops_NP, temperatures_N, leasts_N, sums_NP, *sizes[0], **sizes[1], P=tops_NP.shape[1], num_warps=4
    )
    _pick[(len(scores_NV),)](
        *given, tops_NP, spoilt_NP, temperatures_N, leasts_N, sums_NP, uniforms_N, out_N, *sizes[0], **sizes[1], P=tops_NP.shape[1],
        num_warps=4,
    )  # fmt: skip
    return out_N


def _searched(
    scores_NV: Tensor, barred_NK: Tensor | None
) -> tuple[tuple[Tensor, Tensor], Any, tuple[Tensor, Tensor, Tensor]]:
    """The scores and barred ids as kernels take them, their sizes, and of each part of a row the greatest, its id, and if any is spoilt."""
    rows, vocab = scores_NV.shape
    assert scores_NV.stride(1) == 1
    parts = min(PARTS, triton.next_power_of_2(max(1, PROGRAMS // rows) + 1) // 2)
    tops_NP = scores_NV.new_empty(rows, parts, dtype=torch.float32)
    ids_NP, spoilt_NP = (scores_NV.new_empty(rows, parts, dtype=torch.int32) for _ in range(2))
    given = scores_NV, scores_NV if barred_NK is None else barred_NK
    sizes = (
        (scores_NV.stride(0), vocab, triton.cdiv(vocab, parts)),
        {"K": 0 if barred_NK is None else barred_NK.shape[1], "B": BLOCK},
    )
    _search[(rows, parts)](*given, tops_NP, ids_NP, spoilt_NP, *sizes[0], **sizes[1], num_warps=4)
    return given, sizes, (tops_NP, ids_NP, spoilt_NP)
