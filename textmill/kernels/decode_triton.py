"""A decoding step in Triton kernels: what stands between its matrices and, for few texts, the matrices too.

Shapes in names: N texts, E width, K columns of a matrix, H heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from textmill.kernels.require_triton import tl, triton

FEW = 4
"""Texts for which a matrix is read row by row by these kernels; for more, cuBLAS is faster."""
SPREAD = 264
"""Programs that attention is cut into, if a text is long enough: two for each of an H200's processors."""
MOST_PARTS, PLACES, WARPS = 8, 32, 2
"""Parts of one text's places at most, places looked at in one go, and warps."""
ROWS, TILE, PRODUCT_WARPS = 4, 8192, 4
"""Rows of a matrix that one program takes at most, elements likewise, and its warps."""
LEAST = -1e30


@triton.jit  # type: ignore[untyped-decorator]
def _embed(ids, places, tokens, positions, out, width, C: tl.constexpr):  # type: ignore[no-untyped-def]
    row, columns = tl.program_id(0), tl.arange(0, C)
    inside = columns < width
    token = tl.maximum(tl.load(ids + row), 0) * width + columns
    place = tl.load(places + row) * width + columns
    values = tl.load(tokens + token, mask=inside, other=0.0).to(tl.float32) + tl.load(
        positions + place, mask=inside, other=0.0
    )
    tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(x, delta, bias, weight, shift, sums, out, width, epsilon, C: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, C)
    inside = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    added = tl.load(delta + at, mask=inside, other=0.0).to(tl.float32) + tl.load(
        bias + columns, mask=inside, other=0.0
    ).to(tl.float32)
    rounded = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + added).to(sums.dtype.element_ty)
    tl.store(sums + at, rounded, mask=inside)
    values = rounded.to(tl.float32)
    centred = tl.where(inside, values - tl.sum(values, 0) / width, 0.0)
    spread = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + epsilon)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(shift + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (centred * spread * scale + given).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    x, weight, bias, scale, shift, added, out, outputs, epsilon,
    K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row, rows = tl.program_id(1), tl.program_id(0) * R + tl.arange(0, R)
    columns = tl.arange(0, C)
    inside = columns < K
    there = rows < outputs
    # The matrix is asked for first: it comes from afar, while the norm is made of what is near.
    matrix = tl.load(weight + rows[:, None] * K + columns[None, :], mask=there[:, None] & inside[None, :], other=0.0)
    values = tl.load(x + row * K + columns, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        centred = tl.where(inside, values - tl.sum(values, 0) / K, 0.0)
        spread = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / K + epsilon)
        norm = tl.load(scale + columns, mask=inside, other=0.0).to(tl.float32)
        values = centred * spread * norm + tl.load(shift + columns, mask=inside, other=0.0).to(tl.float32)
        values = values.to(x.dtype.element_ty).to(tl.float32)
    y = tl.sum(matrix.to(tl.float32) * values[None, :], 1) + tl.load(bias + rows, mask=there, other=0.0).to(tl.float32)
    if GELU == "tanh":
        bent = 0.7978845608028654 * (y + 0.044715 * y * y * y)
        y = y * tl.sigmoid(2.0 * bent)
    elif GELU == "none":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    if ADD:
        y += tl.load(added + row * outputs + rows, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + rows, y.to(out.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _joined(gathers, weights, one, working, columns, C: tl.constexpr, S: tl.constexpr, LOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """What all parts of a text's places found together; what others wrote is not looked for in a cache near by."""
    parts = tl.arange(0, S)
    come = parts < working
    tops = tl.load(weights + (one * S + parts) * 2, mask=come, other=LOW, cache_modifier=".cg")
    totals = tl.load(weights + (one * S + parts) * 2 + 1, mask=come, other=0.0, cache_modifier=".cg")
    gathered = tl.load(
        gathers + (one * S + parts)[:, None] * C + columns[None, :], mask=come[:, None], other=0.0, cache_modifier=".cg"
    )
    shares = tl.exp(tops - tl.max(tops, 0))
    return tl.sum(gathered * shares[:, None], 0) / tl.sum(totals * shares, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    qkv, cache, places, out, gathers, weights, arrivals, heads, length, scale,
    D: tl.constexpr, C: tl.constexpr, T: tl.constexpr, S: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    text, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = tl.arange(0, C)
    inside = columns < D
    one, each = text * heads + head, heads * 2 * D
    place = tl.load(places + text).to(tl.int32)
    working = tl.minimum(S, tl.maximum(1, (place + T - 1) // T))
    kept = cache + text.to(tl.int64) * length * each + head * 2 * D
    if part < working:
        rows = part * T + tl.arange(0, T)
        at = kept + rows[:, None] * each + columns[None, :]
        there = (rows < place)[:, None] & inside[None, :]
        keys = tl.load(at, mask=there, other=0.0)
        values = tl.load(at + D, mask=there, other=0.0)
        asking = qkv + one * 3 * D + columns
        query = tl.load(asking, mask=inside, other=0.0).to(tl.float32) * scale
        key = tl.load(asking + D, mask=inside, other=0.0)
        value = tl.load(asking + 2 * D, mask=inside, other=0.0)
        # Every T-th place goes by itself, held against the largest score of its own so far; the next are on their way meanwhile.
        tops, totals, sums = tl.full((T,), LOW, tl.float32), tl.zeros((T,), tl.float32), tl.zeros((T, C), tl.float32)
        for start in range(part * T, place, S * T):
            now_keys, now_values, seen = keys, values, start + tl.arange(0, T) < place
            rows = start + S * T + tl.arange(0, T)
            at = kept + rows[:, None] * each + columns[None, :]
            there = (rows < place)[:, None] & inside[None, :]
            keys = tl.load(at, mask=there, other=0.0)
            values = tl.load(at + D, mask=there, other=0.0)
            scores = tl.where(seen, tl.sum(query[None, :] * now_keys.to(tl.float32), 1), LOW)
            larger = tl.maximum(tops, scores)
            gained, shrink = tl.where(seen, tl.exp(scores - larger), 0.0), tl.exp(tops - larger)
            sums = sums * shrink[:, None] + gained[:, None] * now_values.to(tl.float32)
            totals, tops = totals * shrink + gained, larger
        # The new token sees itself too, in the first part, which keeps it.
        own = tl.where(part == 0, tl.sum(query * key.to(tl.float32), 0), LOW)
        top = tl.maximum(tl.max(tops, 0), own)
        shares, share = tl.exp(tops - top), tl.where(part == 0, tl.exp(own - top), 0.0)
        total = tl.sum(totals * shares, 0) + share
        gathered = tl.sum(sums * shares[:, None], 0) + share * value.to(tl.float32)
        if part == 0:
            tl.store(kept + place * each + columns, key, mask=inside)
            tl.store(kept + place * each + D + columns, value, mask=inside)
        if S == 1:
            tl.store(out + one * D + columns, (gathered / total).to(out.dtype.element_ty), mask=inside)
        else:
            # Whoever comes last puts the parts together, and leaves the count as it was found.
            tl.store(gathers + (one * S + part) * C + columns, gathered)
            tl.store(weights + (one * S + part) * 2, top)
            tl.store(weights + (one * S + part) * 2 + 1, total)
            tl.debug_barrier()
            if tl.atomic_add(arrivals + one, 1, sem="acq_rel", scope="gpu") == working - 1:
                found = _joined(gathers, weights, one, working, columns, C, S, LOW)
                tl.store(out + one * D + columns, found.to(out.dtype.element_ty), mask=inside)
                tl.store(arrivals + one, 0)


def embed(ids_N: Tensor, places_N: Tensor, tokens_VE: Tensor, positions_TE: Tensor) -> Tensor:
    """What the net begins with; an id below 0 is taken for 0."""
    width = tokens_VE.shape[1]
    out_NE = torch.empty(len(ids_N), width, device=ids_N.device, dtype=tokens_VE.dtype)
    _embed[(len(ids_N),)](ids_N, places_N, tokens_VE, positions_TE, out_NE, width, C=triton.next_power_of_2(width))
    return out_NE


def add_norm(x_NE: Tensor, delta_NE: Tensor, bias_E: Tensor, norm: torch.nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """The stream x + delta + bias, and its LayerNorm."""
    rows, width = x_NE.shape
    sums_NE, out_NE = torch.empty_like(x_NE), torch.empty_like(x_NE)
    _add_norm[(rows,)](
        x_NE,
        delta_NE,
        bias_E,
        norm.weight,
        norm.bias,
        sums_NE,
        out_NE,
        width,
        norm.eps,
        C=triton.next_power_of_2(width),
        num_warps=4,
    )
    return sums_NE, out_NE


def product(x_NK: Tensor, linear: Any, norm: Any = None, gelu: str = "", added: Tensor | None = None) -> Tensor:
    """linear(norm(x)), then GELU as torch names it ("tanh" or "none") or something added; for few texts."""
    rows, inputs = x_NK.shape
    outputs, columns = linear.weight.shape[0], triton.next_power_of_2(inputs)
    out_NF = torch.empty(rows, outputs, device=x_NK.device, dtype=x_NK.dtype)
    at_once, warps = _shape_of(outputs, columns)
    _product[(triton.cdiv(outputs, at_once), rows)](
        x_NK, linear.weight, linear.bias, norm.weight if norm else x_NK, norm.bias if norm else x_NK, x_NK if added is None else added,
        out_NF, outputs, norm.eps if norm else 0.0, K=inputs, C=columns, R=at_once, NORM=norm is not None, GELU=gelu,
        ADD=added is not None, num_warps=warps,
    )  # fmt: skip
    return out_NF


def _shape_of(outputs: int, columns: int) -> tuple[int, int]:
    """Rows of a matrix that one program takes, and its warps."""
    most = max(1, min(ROWS, TILE // columns, outputs // 256))
    return triton.next_power_of_2(most + 1) // 2, PRODUCT_WARPS


def attend(qkv_NH3D: Tensor, cache: Tensor, places_N: Tensor, arrivals: Tensor) -> Tensor:
    """Put each text's new key and value at its place in the cache [slots, length, H, 2, D]; what its query finds there, heads joined.

    `arrivals` is a zero for each head of each slot.
    """
    rows, heads, _, head = qkv_NH3D.shape
    columns, parts = (
        triton.next_power_of_2(head),
        max(1, min(MOST_PARTS, triton.next_power_of_2(SPREAD // (rows * heads) + 1) // 2)),
    )
    out_NE = torch.empty(rows, heads * head, device=qkv_NH3D.device, dtype=qkv_NH3D.dtype)
    gathers, weights = (qkv_NH3D.new_empty(rows, heads, parts, each, dtype=torch.float32) for each in (columns, 2))
    _attend[(rows, heads, parts)](
        qkv_NH3D, cache, places_N, out_NE, gathers, weights, arrivals, heads, cache.shape[1], head**-0.5,
        D=head, C=columns, T=PLACES, S=parts, LOW=LEAST, num_warps=WARPS,
    )  # fmt: skip
    return out_NE
