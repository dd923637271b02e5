"""Triton kernel for the attention of a decoding step; queries and keys may be normalised and turned (rotary) in it.

Shapes in names: N texts, E width, H heads of queries, K heads of keys, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from textmill.kernels.require_triton import tl, triton

SPREAD = 264
"""Programs that attention is divided into if texts are long enough: two per multiprocessor of an H200."""
MAX_PARTS = 8
POSITIONS = 32
HEAD_PER_WARP = 32
"""Most parts that one text's positions are divided into, positions per iteration, and columns of a head per warp."""
LOWEST = -1e30


@triton.jit  # type: ignore[untyped-decorator]
def _combine_parts(  # type: ignore[no-untyped-def]
    partial_outputs, weights, one, working, columns, C: tl.constexpr, S: tl.constexpr, LOW: tl.constexpr
):
    """Combine the partial results of all parts; .cg bypasses the L1 cache, since other programs wrote them."""
    parts = tl.arange(0, S)
    finished = parts < working
    tops = tl.load(weights + (one * S + parts) * 2, mask=finished, other=LOW, cache_modifier=".cg")
    totals = tl.load(weights + (one * S + parts) * 2 + 1, mask=finished, other=0.0, cache_modifier=".cg")
    output = tl.load(
        partial_outputs + (one * S + parts)[:, None] * C + columns[None, :],
        mask=finished[:, None],
        other=0.0,
        cache_modifier=".cg",
    )
    scales = tl.exp(tops - tl.max(tops, 0))
    return tl.sum(output * scales[:, None], 0) / tl.sum(totals * scales, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _store_part(  # type: ignore[no-untyped-def]
    out,
    partial_outputs,
    weights,
    arrivals,
    one,
    part,
    working,
    output,
    top,
    total,
    columns,
    D: tl.constexpr,
    C: tl.constexpr,
    S: tl.constexpr,
    LOW: tl.constexpr,
):
    """Store a part's result; the last program to finish combines the parts and resets the counter."""
    tl.store(partial_outputs + (one * S + part) * C + columns, output)
    tl.store(weights + (one * S + part) * 2, top)
    tl.store(weights + (one * S + part) * 2 + 1, total)
    tl.debug_barrier()
    if tl.atomic_add(arrivals + one, 1, sem="acq_rel", scope="gpu") == working - 1:
        found = _combine_parts(partial_outputs, weights, one, working, columns, C, S, LOW)
        tl.store(out + one * D + columns, found.to(out.dtype.element_ty), mask=columns < D)
        tl.store(arrivals + one, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _query_or_key(  # type: ignore[no-untyped-def]
    head, columns, cos, sin, weight, epsilon, D: tl.constexpr, TURN: tl.constexpr, NORM: tl.constexpr
):
    """One head's query or key, normalised and turned by the angles of its position."""
    inside = columns < D
    found = tl.load(head + columns, mask=inside, other=0.0)
    if TURN:
        # The two channels of a pair are half a head apart.
        first = columns < D // 2
        partners = tl.where(first, columns + D // 2, columns - D // 2)
        pairs = tl.where(first, columns, partners)
        values = found.to(tl.float32)
        others = tl.load(head + partners, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            inverse = 1.0 / tl.sqrt(tl.sum(values * values, 0) / D + epsilon)
            values = values * inverse * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
            others = others * inverse * tl.load(weight + partners, mask=inside, other=0.0).to(tl.float32)
            values = values.to(head.dtype.element_ty).to(tl.float32)
            others = others.to(head.dtype.element_ty).to(tl.float32)
        turned = others * tl.load(sin + pairs, mask=inside, other=0.0)
        values = values * tl.load(cos + pairs, mask=inside, other=0.0)
        found = tl.where(first, values - turned, values + turned).to(head.dtype.element_ty)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    qkv,
    cache,
    position_ids,
    out,
    partial_outputs,
    weights,
    arrivals,
    heads,
    key_heads,
    length,
    scale,
    row,
    query_step,
    key_step,
    key_start,
    value_start,
    cos,
    sin,
    query_norm,
    key_norm,
    epsilon,
    D: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    S: tl.constexpr,
    LOW: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
):
    text = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    key_head = head // (heads // key_heads)
    columns = tl.arange(0, C)
    inside = columns < D
    one = text * heads + head
    each = key_heads * 2 * D
    position = tl.load(position_ids + text).to(tl.int32)
    working = tl.minimum(S, tl.maximum(1, (position + T - 1) // T))
    cached = cache + text.to(tl.int64) * length * each + key_head * 2 * D
    if part < working:
        rows = part * T + tl.arange(0, T)
        at = cached + rows[:, None] * each + columns[None, :]
        valid = (rows < position)[:, None] & inside[None, :]
        keys = tl.load(at, mask=valid, other=0.0)
        values = tl.load(at + D, mask=valid, other=0.0)
        current = qkv + text * row
        turn = position * (D // 2)
        query = (
            _query_or_key(
                current + head * query_step, columns, cos + turn, sin + turn, query_norm, epsilon, D, TURN, NORM
            ).to(tl.float32)
            * scale
        )
        key = _query_or_key(
            current + key_start + key_head * key_step, columns, cos + turn, sin + turn, key_norm, epsilon, D, TURN, NORM
        )
        value = tl.load(current + value_start + key_head * key_step + columns, mask=inside, other=0.0)
        # Online softmax, separately for each of T lanes; the next keys and values are prefetched meanwhile.
        tops = tl.full((T,), LOW, tl.float32)
        totals = tl.zeros((T,), tl.float32)
        sums = tl.zeros((T, C), tl.float32)
        for start in range(part * T, position, S * T):
            now_keys = keys
            now_values = values
            seen = start + tl.arange(0, T) < position
            rows = start + S * T + tl.arange(0, T)
            at = cached + rows[:, None] * each + columns[None, :]
            valid = (rows < position)[:, None] & inside[None, :]
            keys = tl.load(at, mask=valid, other=0.0)
            values = tl.load(at + D, mask=valid, other=0.0)
            scores = tl.where(seen, tl.sum(query[None, :] * now_keys.to(tl.float32), 1), LOW)
            larger = tl.maximum(tops, scores)
            gained = tl.where(seen, tl.exp(scores - larger), 0.0)
            shrink = tl.exp(tops - larger)
            sums = sums * shrink[:, None] + gained[:, None] * now_values.to(tl.float32)
            totals = totals * shrink + gained
            tops = larger
        # The new token attends to itself in the first part, which also writes it to the cache.
        own = tl.where(part == 0, tl.sum(query * key.to(tl.float32), 0), LOW)
        top = tl.maximum(tl.max(tops, 0), own)
        scales = tl.exp(tops - top)
        share = tl.where(part == 0, tl.exp(own - top), 0.0)
        total = tl.sum(totals * scales, 0) + share
        output = tl.sum(sums * scales[:, None], 0) + share * value.to(tl.float32)
        if (part == 0) & (head % (heads // key_heads) == 0):
            tl.store(cached + position * each + columns, key, mask=inside)
            tl.store(cached + position * each + D + columns, value, mask=inside)
        if S == 1:
            tl.store(out + one * D + columns, (output / total).to(out.dtype.element_ty), mask=inside)
        else:
            _store_part(
                out, partial_outputs, weights, arrivals, one, part, working, output, top, total, columns, D, C, S, LOW
            )


def attend(
    qkv: Tensor,
    cache: Tensor,
    positions_N: Tensor,
    arrivals: Tensor,
    angles: tuple[Tensor, Tensor] | None = None,
    norms: tuple[Any, Any] | None = None,
) -> Tensor:
    """Write each text's new key and value into the KV cache [slots, length, K, 2, D]; return attention, heads joined.

    `qkv` is [N, H, 3, D], or [N, H + 2 K, D] with all queries first, then keys, then values. `arrivals` holds a zero
    per head and slot: a counter of finished parts. `angles`, cosines and sines [length, D / 2] of every position, turn
    queries and keys; `norms` are their RMSNorms, for which `angles` are needed.
    """
    rows, (length, key_heads, _, head) = len(qkv), cache.shape[1:]
    heads = qkv.shape[1] if qkv.ndim == 4 else qkv.shape[1] - 2 * key_heads
    steps = (3 * head, 3 * head, head, 2 * head)
    if qkv.ndim == 3:
        steps = (head, head, heads * head, (heads + key_heads) * head)
    columns = triton.next_power_of_2(head)
    parts = max(1, min(MAX_PARTS, triton.next_power_of_2(SPREAD // (rows * heads) + 1) // 2))
    out_NE = torch.empty(rows, heads * head, device=qkv.device, dtype=qkv.dtype)
    partial_outputs, weights = (qkv.new_empty(rows, heads, parts, each, dtype=torch.float32) for each in (columns, 2))
    cos, sin = angles or (qkv, qkv)
    query_norm, key_norm = (norm.weight for norm in norms) if norms else (qkv, qkv)
    _attend[(rows, heads, parts)](
        qkv,
        cache,
        positions_N,
        out_NE,
        partial_outputs,
        weights,
        arrivals,
        heads,
        key_heads,
        length,
        head**-0.5,
        qkv.stride(0),
        *steps,
        cos,
        sin,
        query_norm,
        key_norm,
        norms[0].eps if norms else 0.0,
        D=head,
        C=columns,
        T=POSITIONS,
        S=parts,
        LOW=LOWEST,
        TURN=angles is not None,
        NORM=norms is not None,
        num_warps=max(2, columns // HEAD_PER_WARP),
    )
    return out_NE
