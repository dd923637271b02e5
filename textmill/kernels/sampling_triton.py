"""The next token of each text in a few small Triton kernels: greedy, or with temperature, top_k, top_p and min_p.

Nothing is sorted. What top_k and top_p keep are all logits from a threshold on, and a threshold is searched digit by
digit: each round counts, for 16 candidates, how many logits (top_k) or how much probability (top_p) is above it. A
logit's bits, with their order corrected for negative ones, are its key, an integer of 32 bits: eight rounds, or four in
bf16, where the lower half is empty. A program adds in fp32 per thread and once at its end over threads; programs are
added as integers, so that their order does not matter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from textmill.kernels.triton_support import tl, triton

PROGRAMS = 1024
PARTS = 256
BLOCK = 512
SEARCHED = 128
"""Programs for all texts, most programs per text, and logits per iteration; a search has 16 sums of each."""


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
def _load_logits(at, columns, inside, banned, row, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some logits, their keys, and which of them may be chosen."""
    values = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32) + 0.0  # -0 becomes 0
    allowed = inside
    for number in tl.static_range(K):
        allowed &= columns != tl.load(banned + row * K + number).to(tl.int32)
    bits = values.to(tl.uint32, bitcast=True)
    keys = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return values, keys, allowed


@triton.jit
def _scaled(values, top, temperature):  # type: ignore[no-untyped-def]
    """Logits after the temperature, at most 0, in fp64; rounded as torch rounds."""
    scaled = tl.div_rn(values - top, temperature)
    return tl.where(temperature == 1.0, values.to(tl.float64) - top.to(tl.float64), scaled.to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator]
def _next_prefix(  # type: ignore[no-untyped-def]
    sums, totals, prefixes, limits, row, done, ROUNDS: tl.constexpr, MASS: tl.constexpr
):
    """The digits of a threshold that so many rounds have found, or 0, and whether the row has a limit."""
    prefix = tl.full((), 0, tl.int64)
    limit = tl.load(limits + row).to(tl.float64)
    if MASS:
        limited = limit < 1.0
        limit *= tl.load(totals + row).to(tl.float64)
    else:
        limited = limit > 0.0
    if done > 0:
        at = (row * 2 + MASS) * ROUNDS + done - 1
        above = tl.load(sums + at * 16 + tl.arange(0, 16)).to(tl.float64)
        digit = tl.sum(tl.where(above >= limit, 1, 0), 0).to(tl.int64)
        prefix = tl.load(prefixes + at) + (digit << (32 - 4 * done))
    return tl.where(limited, prefix, 0), limited


@triton.jit  # type: ignore[untyped-decorator]
def _search(  # type: ignore[no-untyped-def]
    logits,
    banned,
    maxima,
    temperatures,
    top_k,
    top_p,
    sums,
    totals,
    prefixes,
    stride,
    vocab,
    each,
    number,
    K: tl.constexpr,
    B: tl.constexpr,
    P: tl.constexpr,
    ROUNDS: tl.constexpr,
    MASS: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """One round: the counts (top_k) or the probabilities (MASS, top_p) above each of 16 candidates."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    prefix, limited = _next_prefix(sums, totals, prefixes, top_p if MASS else top_k, row, number, ROUNDS, MASS)
    temperature = tl.load(temperatures + row)
    if limited & (temperature > 0.0):
        at = (row * 2 + MASS) * ROUNDS + number
        if part == 0:
            tl.store(prefixes + at, prefix)
        lowest = tl.full((), 0, tl.int64)
        top = tl.max(tl.load(maxima + row * P + tl.arange(0, P)), 0)
        if MASS & TOP_K:
            lowest, _ = _next_prefix(sums, totals, prefixes, top_k, row, ROUNDS, ROUNDS, 0)
        digits = tl.arange(0, 16)
        # What is above digit 15 is below the limit, as the round before found; this candidate may not fit 32 bits.
        candidates = (prefix + ((tl.minimum(digits, 14).to(tl.int64) + 1) << (28 - 4 * number))).to(tl.uint32)
        above = tl.zeros((16, B), tl.float32)
        total = tl.zeros((B,), tl.float32)
        for start in range(part * each, tl.minimum(vocab, (part + 1) * each), B):
            columns = start + tl.arange(0, B)
            inside = columns < tl.minimum(vocab, (part + 1) * each)
            values, keys, allowed = _load_logits(logits + row.to(tl.int64) * stride, columns, inside, banned, row, K)
            weights = (
                tl.exp(_scaled(values, top, temperature).to(tl.float32)) if MASS else tl.full((B,), 1.0, tl.float32)
            )
            weights = tl.where(allowed & (keys >= lowest), weights, 0.0)
            above += tl.where(keys[None, :] >= candidates[:, None], weights[None, :], 0.0)
            total += weights
        unit = 1099511627776.0 if MASS else 1.0
        found = tl.where(digits < 15, tl.sum(above, 1), 0.0)
        tl.atomic_add(sums + at * 16 + digits, (found * unit).to(tl.int64))
        if MASS:  # noqa: SIM102 - one is a constant
            if number == 0:
                tl.atomic_add(totals + row, (tl.sum(total, 0) * unit).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _weights(  # type: ignore[no-untyped-def]
    at, columns, inside, banned, row, top, temperature, lowest, least, K: tl.constexpr
):
    """Unnormalised probabilities of some logits in fp64; 0 if a logit cannot be chosen."""
    values, keys, allowed = _load_logits(at, columns, inside, banned, row, K)
    scaled = _scaled(values, top, temperature)
    return tl.where(allowed & (keys >= lowest) & (scaled >= least), tl.exp(scaled), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_weights(  # type: ignore[no-untyped-def]
    logits,
    banned,
    maxima,
    temperatures,
    top_k,
    top_p,
    least,
    sums,
    totals,
    prefixes,
    lowest,
    masses,
    stride,
    vocab,
    each,
    K: tl.constexpr,
    B: tl.constexpr,
    P: tl.constexpr,
    ROUNDS: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        top = tl.max(tl.load(maxima + row * P + tl.arange(0, P)), 0)
        first = tl.full((), 0, tl.int64)
        if TOP_K:
            first, _ = _next_prefix(sums, totals, prefixes, top_k, row, ROUNDS, ROUNDS, 0)
        if TOP_P:
            second, _ = _next_prefix(sums, totals, prefixes, top_p, row, ROUNDS, ROUNDS, 1)
            first = tl.maximum(first, second)
        if part == 0:
            tl.store(lowest + row, first)
        limit = tl.load(least + row)
        total = tl.zeros((B,), tl.float64)
        for start in range(part * each, tl.minimum(vocab, (part + 1) * each), B):
            columns = start + tl.arange(0, B)
            inside = columns < tl.minimum(vocab, (part + 1) * each)
            at = logits + row.to(tl.int64) * stride
            total += _weights(at, columns, inside, banned, row, top, temperature, first, limit, K)
        tl.store(masses + row * P + part, tl.sum(total, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _pick(  # type: ignore[no-untyped-def]
    logits,
    banned,
    maxima,
    ids,
    not_finite,
    temperatures,
    least,
    lowest,
    masses_by_part,
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
    found = tl.load(maxima + row * P + parts)
    top = tl.max(found, 0)
    id_ = tl.min(tl.where(found == top, tl.load(ids + row * P + parts), 2147483647), 0)
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        masses = tl.load(masses_by_part + row * P + parts)
        ends = tl.cumsum(masses, 0)
        point = tl.load(uniforms + row) * tl.sum(masses, 0)
        # The part that the point falls into; if rounding puts it after all, the last part with any probability.
        reached_part = tl.min(tl.where((ends > point) & (masses > 0), parts, P), 0)
        last = tl.max(tl.where(masses > 0, parts, 0), 0)
        part = tl.where(reached_part < P, reached_part, last)
        before = tl.sum(tl.where(parts < part, masses, 0.0), 0)
        first = tl.load(lowest + row)
        limit = tl.load(least + row)
        chosen = vocab
        heaviest = 0
        for start in range(part * each, tl.minimum(vocab, (part + 1) * each), B):
            columns = start + tl.arange(0, B)
            inside = columns < tl.minimum(vocab, (part + 1) * each)
            at = logits + row.to(tl.int64) * stride
            weights = _weights(at, columns, inside, banned, row, top, temperature, first, limit, K)
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


class RowSettings(NamedTuple):
    """How each row is sampled."""

    temperatures_N: Tensor
    """0: the first id with the largest logit."""
    top_k_N: Tensor | None
    """0: no limit; None if no row has one. All logits that equal the k-th largest are kept."""
    top_p_N: Tensor | None
    """1: no limit; None if no row has one. All logits that equal the last one kept are kept too."""
    log_min_p_N: Tensor
    """In fp64; minus infinity: no limit."""


def sample_ids(logits_NV: Tensor, banned_NK: Tensor | None, settings: RowSettings, uniforms_N: Tensor) -> Tensor:
    """Sample one id per row by inverting the cumulative distribution at `uniforms_N` (0 to below 1).

    Logits are shifted by the row's maximum and divided by its temperature. Banned ids are excluded first, then what the
    settings exclude. -1 if a logit is not finite.
    """
    given, (sizes, shape), (maxima_NP, ids_NP, not_finite_NP) = _find_maxima(logits_NV, banned_NK)
    rows, parts = maxima_NP.shape
    rounds = 4 if logits_NV.dtype == torch.bfloat16 else 8
    temperatures_N, top_k_N, top_p_N, log_min_p_N = settings
    k_N = temperatures_N if top_k_N is None else top_k_N
    p_N = temperatures_N if top_p_N is None else top_p_N
    sums = torch.zeros(rows * 2 * rounds * 16 + rows, dtype=torch.long, device=logits_NV.device)
    totals_N = sums[-rows:]
    prefixes, lowest_N = (logits_NV.new_empty(size, dtype=torch.long) for size in (rows * 2 * rounds, rows))
    masses_NP = maxima_NP.new_empty(maxima_NP.shape, dtype=torch.float64)
    out_N = lowest_N.new_empty(rows)
    for mass in (0, 1):
        for number in range(rounds if (top_p_N if mass else top_k_N) is not None else 0):
            _search[(rows, parts)](
                *given,
                maxima_NP,
                temperatures_N,
                k_N,
                p_N,
                sums,
                totals_N,
                prefixes,
                *sizes,
                number,
                **shape | {"B": SEARCHED},
                P=parts,
                ROUNDS=rounds,
                MASS=mass,
                TOP_K=top_k_N is not None,
                num_warps=4,
            )
    _sum_weights[(rows, parts)](
        *given,
        maxima_NP,
        temperatures_N,
        k_N,
        p_N,
        log_min_p_N,
        sums,
        totals_N,
        prefixes,
        lowest_N,
        masses_NP,
        *sizes,
        **shape,
        P=parts,
        ROUNDS=rounds,
        TOP_K=top_k_N is not None,
        TOP_P=top_p_N is not None,
        num_warps=4,
    )
    _pick[(rows,)](
        *given,
        maxima_NP,
        ids_NP,
        not_finite_NP,
        temperatures_N,
        log_min_p_N,
        lowest_N,
        masses_NP,
        uniforms_N,
        out_N,
        *sizes,
        **shape,
        P=parts,
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
