"""Triton kernels for a decoding step: everything between the matmuls and, for few texts, the matmuls too.

Shapes in names: N texts, E width, K columns of a matrix, H heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from textmill.kernels.require_triton import tl, triton

MAX_FUSED_TEXTS = 4
"""Up to so many texts these kernels do the matmuls too; for more, cuBLAS is faster."""
SPREAD = 264
"""Programs that attention is divided into if texts are long enough: two per multiprocessor of an H200."""
MAX_PARTS, POSITIONS, WARPS = 8, 32, 2
"""Most parts that one text's positions are divided into, positions per iteration, and warps."""
ROWS, TILE, LINEAR_WARPS = 4, 8192, 4
"""Most rows and elements of a matrix per program, and its warps."""
LOWEST = -1e30


@triton.jit  # type: ignore[untyped-decorator]
def _embed(ids, position_ids, tokens, positions, out, width, C: tl.constexpr):  # type: ignore[no-untyped-def]
    row, columns = tl.program_id(0), tl.arange(0, C)
    inside = columns < width
    token = tl.maximum(tl.load(ids + row), 0) * width + columns
    position = tl.load(position_ids + row) * width + columns
    values = tl.load(tokens + token, mask=inside, other=0.0).to(tl.float32) + tl.load(
        positions + position, mask=inside, other=0.0
    )
    tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    x, delta, bias, weight, shift, sums, out, width, epsilon, C: tl.constexpr
):
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
    inverse_std = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + epsilon)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(shift + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (centred * inverse_std * scale + given).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _fused_linear(  # type: ignore[no-untyped-def]
    x, weight, bias, scale, shift, added, out, outputs, epsilon,
    K: tl.constexpr, C: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, GELU: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row, rows = tl.program_id(1), tl.program_id(0) * R + tl.arange(0, R)
    columns = tl.arange(0, C)
    inside = columns < K
    valid = rows < outputs
    # Load the matrix first: its latency hides behind the norm, whose inputs are in the cache.
    matrix = tl.load(weight + rows[:, None] * K + columns[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
    values = tl.load(x + row * K + columns, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        centred = tl.where(inside, values - tl.sum(values, 0) / K, 0.0)
        inverse_std = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / K + epsilon)
        norm = tl.load(scale + columns, mask=inside, other=0.0).to(tl.float32)
        values = centred * inverse_std * norm + tl.load(shift + columns, mask=inside, other=0.0).to(tl.float32)
        values = values.to(x.dtype.element_ty).to(tl.float32)
    y = tl.sum(matrix.to(tl.float32) * values[None, :], 1) + tl.load(bias + rows, mask=valid, other=0.0).to(tl.float32)
    if GELU == "tanh":
        inner = 0.7978845608028654 * (y + 0.044715 * y * y * y)
        y = y * tl.sigmoid(2.0 * inner)
    elif GELU == "none":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    if ADD:
        y += tl.load(added + row * outputs + rows, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + rows, y.to(out.dtype.element_ty), mask=valid)


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
def _attend(  # type: ignore[no-untyped-def]
    qkv, cache, position_ids, out, partial_outputs, weights, arrivals, heads, length, scale,
    D: tl.constexpr, C: tl.constexpr, T: tl.constexpr, S: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    text, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = tl.arange(0, C)
    inside = columns < D
    one, each = text * heads + head, heads * 2 * D
    position = tl.load(position_ids + text).to(tl.int32)
    working = tl.minimum(S, tl.maximum(1, (position + T - 1) // T))
    cached = cache + text.to(tl.int64) * length * each + head * 2 * D
    if part < working:
        rows = part * T + tl.arange(0, T)
        at = cached + rows[:, None] * each + columns[None, :]
        valid = (rows < position)[:, None] & inside[None, :]
        keys = tl.load(at, mask=valid, other=0.0)
        values = tl.load(at + D, mask=valid, other=0.0)
        current = qkv + one * 3 * D + columns
        query = tl.load(current, mask=inside, other=0.0).to(tl.float32) * scale
        key = tl.load(current + D, mask=inside, other=0.0)
        value = tl.load(current + 2 * D, mask=inside, other=0.0)
        # Online softmax, separately for each of T lanes; the next keys and values are prefetched meanwhile.
        tops, totals, sums = tl.full((T,), LOW, tl.float32), tl.zeros((T,), tl.float32), tl.zeros((T, C), tl.float32)
        for start in range(part * T, position, S * T):
            now_keys, now_values, seen = keys, values, start + tl.arange(0, T) < position
            rows = start + S * T + tl.arange(0, T)
            at = cached + rows[:, None] * each + columns[None, :]
            valid = (rows < position)[:, None] & inside[None, :]
            keys = tl.load(at, mask=valid, other=0.0)
            values = tl.load(at + D, mask=valid, other=0.0)
            scores = tl.where(seen, tl.sum(query[None, :] * now_keys.to(tl.float32), 1), LOW)
            larger = tl.maximum(tops, scores)
            gained, shrink = tl.where(seen, tl.exp(scores - larger), 0.0), tl.exp(tops - larger)
            sums = sums * shrink[:, None] + gained[:, None] * now_values.to(tl.float32)
            totals, tops = totals * shrink + gained, larger
        # The new token attends to itself in the first part, which also writes it to the cache.
        own = tl.where(part == 0, tl.sum(query * key.to(tl.float32), 0), LOW)
        top = tl.maximum(tl.max(tops, 0), own)
        scales, share = tl.exp(tops - top), tl.where(part == 0, tl.exp(own - top), 0.0)
        total = tl.sum(totals * scales, 0) + share
        output = tl.sum(sums * scales[:, None], 0) + share * value.to(tl.float32)
        if part == 0:
            tl.store(cached + position * each + columns, key, mask=inside)
            tl.store(cached + position * each + D + columns, value, mask=inside)
        if S == 1:
            tl.store(out + one * D + columns, (output / total).to(out.dtype.element_ty), mask=inside)
        else:
            # The last program to finish combines the parts and resets the counter.
            tl.store(partial_outputs + (one * S + part) * C + columns, output)
            tl.store(weights + (one * S + part) * 2, top)
            tl.store(weights + (one * S + part) * 2 + 1, total)
            tl.debug_barrier()
            if tl.atomic_add(arrivals + one, 1, sem="acq_rel", scope="gpu") == working - 1:
                found = _combine_parts(partial_outputs, weights, one, working, columns, C, S, LOW)
                tl.store(out + one * D + columns, found.to(out.dtype.element_ty), mask=inside)
                tl.store(arrivals + one, 0)


def embed(ids_N: Tensor, positions_N: Tensor, tokens_VE: Tensor, positions_TE: Tensor) -> Tensor:
    """Token plus position embeddings; an id below 0 counts as 0."""
    width = tokens_VE.shape[1]
    out_NE = torch.empty(len(ids_N), width, device=ids_N.device, dtype=tokens_VE.dtype)
    _embed[(len(ids_N),)](ids_N, positions_N, tokens_VE, positions_TE, out_NE, width, C=triton.next_power_of_2(width))
    return out_NE


def add_norm(x_NE: Tensor, delta_NE: Tensor, bias_E: Tensor, norm: torch.nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """The residual stream x + delta + bias, and its LayerNorm."""
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


def fused_linear(x_NK: Tensor, linear: Any, norm: Any = None, gelu: str = "", added: Tensor | None = None) -> Tensor:
    """linear(norm(x)), then GELU ("tanh" or "none", as in torch) or a residual added; for few texts."""
    rows, inputs = x_NK.shape
    outputs, columns = linear.weight.shape[0], triton.next_power_of_2(inputs)
    out_NF = torch.empty(rows, outputs, device=x_NK.device, dtype=x_NK.dtype)
    at_once, warps = _tile_shape(outputs, columns)
    _fused_linear[(triton.cdiv(outputs, at_once), rows)](
        x_NK, linear.weight, linear.bias, norm.weight if norm else x_NK, norm.bias if norm else x_NK,
        x_NK if added is None else added, out_NF, outputs, norm.eps if norm else 0.0,
        K=inputs, C=columns, R=at_once, NORM=norm is not None, GELU=gelu, ADD=added is not None, num_warps=warps,
    )  # fmt: skip
    return out_NF


def _tile_shape(outputs: int, columns: int) -> tuple[int, int]:
    """Rows of a matrix per program, and its warps."""
    most = max(1, min(ROWS, TILE // columns, outputs // 256))
    return triton.next_power_of_2(most + 1) // 2, LINEAR_WARPS


def attend(qkv_NH3D: Tensor, cache: Tensor, positions_N: Tensor, arrivals: Tensor) -> Tensor:
    """Write each text's new key and value into the KV cache [slots, length, H, 2, D]; return attention, heads joined.

    `arrivals` holds a zero per head and slot: a counter of finished parts.
    """
    rows, heads, _, head = qkv_NH3D.shape
    columns, parts = (
        triton.next_power_of_2(head),
        max(1, min(MAX_PARTS, triton.next_power_of_2(SPREAD // (rows * heads) + 1) // 2)),
    )
    out_NE = torch.empty(rows, heads * head, device=qkv_NH3D.device, dtype=qkv_NH3D.dtype)
    partial_outputs, weights = (
        qkv_NH3D.new_empty(rows, heads, parts, each, dtype=torch.float32) for each in (columns, 2)
    )
    _attend[(rows, heads, parts)](
        qkv_NH3D, cache, positions_N, out_NE, partial_outputs, weights, arrivals, heads, cache.shape[1], head**-0.5,
        D=head, C=columns, T=POSITIONS, S=parts, LOW=LOWEST, num_warps=WARPS,
    )  # fmt: skip
    return out_NE
