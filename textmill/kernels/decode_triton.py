"""Triton kernels for a decoding step: everything between the matmuls and, for few texts, the matmuls too.

Shapes in names: N texts, E width, K columns of a matrix, F its rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from textmill.kernels.triton_support import tl, triton

MAX_FUSED_TEXTS = 4
MAX_FUSED_WIDTH = 8192
"""Up to so many texts and columns of a matrix these kernels do the matmuls too; for more, cuBLAS is faster."""
ACTIVATIONS = ("gelu_new", "gelu", "silu", "relu2")
"""Activations that the kernels compute."""
ROWS = 4
TILE = 8192
LINEAR_WARPS = 4
"""Most rows and elements of a matrix per program, and its warps."""
GATE_COLUMNS = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _embed(  # type: ignore[no-untyped-def]
    ids, position_ids, tokens, positions, out, width, C: tl.constexpr, POSITIONS: tl.constexpr
):
    row = tl.program_id(0)
    columns = tl.arange(0, C)
    inside = columns < width
    token = tl.maximum(tl.load(ids + row), 0) * width + columns
    values = tl.load(tokens + token, mask=inside, other=0.0).to(tl.float32)
    if POSITIONS:
        position = tl.load(position_ids + row) * width + columns
        values += tl.load(positions + position, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _normed(values, columns, weight, shift, width, epsilon, RMS: tl.constexpr):  # type: ignore[no-untyped-def]
    """RMSNorm or LayerNorm of one row; values outside are 0."""
    inside = columns < width
    if not RMS:
        values = tl.where(inside, values - tl.sum(values, 0) / width, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + epsilon)
    values = values * inverse * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if not RMS:
        values += tl.load(shift + columns, mask=inside, other=0.0).to(tl.float32)
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _activate(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND == "gelu_new":
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "silu":
        x = x * tl.sigmoid(x)
    elif KIND == "relu2":
        x = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    x, delta, bias, weight, shift, sums, out, width, epsilon, C: tl.constexpr, BIAS: tl.constexpr, RMS: tl.constexpr
):
    columns = tl.arange(0, C)
    inside = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    added = tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        added += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    rounded = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + added).to(sums.dtype.element_ty)
    tl.store(sums + at, rounded, mask=inside)
    values = _normed(rounded.to(tl.float32), columns, weight, shift, width, epsilon, RMS)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_gate(both, out, width, C: tl.constexpr, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    columns = tl.program_id(1) * C + tl.arange(0, C)
    inside = columns < width
    at = both + row * 2 * width + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    values = _activate(gate, ACTIVATION) * tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, values.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _fused_linear(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    scale,
    shift,
    added,
    out,
    outputs,
    epsilon,
    K: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    NORM: tl.constexpr,
    RMS: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(1)
    rows = tl.program_id(0) * R + tl.arange(0, R)
    columns = tl.arange(0, C)
    inside = columns < K
    valid = rows < outputs
    # Load the matrix first: its latency hides behind the norm, whose inputs are in the cache.
    at = weight + rows[:, None] * K + columns[None, :]
    matrix = tl.load(at, mask=valid[:, None] & inside[None, :], other=0.0)
    if GATED:
        second = tl.load(at + outputs * K, mask=valid[:, None] & inside[None, :], other=0.0)
    values = tl.load(x + row * K + columns, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        values = _normed(values, columns, scale, shift, K, epsilon, RMS).to(x.dtype.element_ty).to(tl.float32)
    y = tl.sum(matrix.to(tl.float32) * values[None, :], 1)
    if BIAS:
        y += tl.load(bias + rows, mask=valid, other=0.0).to(tl.float32)
    y = _activate(y, ACTIVATION)
    if GATED:
        factor = tl.sum(second.to(tl.float32) * values[None, :], 1)
        if BIAS:
            factor += tl.load(bias + outputs + rows, mask=valid, other=0.0).to(tl.float32)
        y *= factor
    if ADD:
        y += tl.load(added + row * outputs + rows, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + rows, y.to(out.dtype.element_ty), mask=valid)


def embed(ids_N: Tensor, positions_N: Tensor, tokens_VE: Tensor, positions_TE: Tensor | None = None) -> Tensor:
    """Token plus position embeddings, if there are any; an id below 0 counts as 0."""
    width = tokens_VE.shape[1]
    out_NE = torch.empty(len(ids_N), width, device=ids_N.device, dtype=tokens_VE.dtype)
    _embed[(len(ids_N),)](
        ids_N,
        positions_N,
        tokens_VE,
        tokens_VE if positions_TE is None else positions_TE,
        out_NE,
        width,
        C=triton.next_power_of_2(width),
        POSITIONS=positions_TE is not None,
    )
    return out_NE


def add_norm(x_NE: Tensor, delta_NE: Tensor, bias_E: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """The residual stream x + delta + bias, and its LayerNorm or RMSNorm."""
    rows, width = x_NE.shape
    sums_NE = torch.empty_like(x_NE)
    out_NE = torch.empty_like(x_NE)
    rms = not isinstance(norm, torch.nn.LayerNorm)
    _add_norm[(rows,)](
        x_NE,
        delta_NE,
        delta_NE if bias_E is None else bias_E,
        norm.weight,
        norm.weight if rms else norm.bias,
        sums_NE,
        out_NE,
        width,
        norm.eps,
        C=triton.next_power_of_2(width),
        BIAS=bias_E is not None,
        RMS=rms,
        num_warps=4,
    )
    return sums_NE, out_NE


def multiply_gate(both_NF: Tensor, activation: str) -> Tensor:
    """The first half of the columns, activated, times the second half."""
    rows = both_NF.shape[0]
    width = both_NF.shape[1] // 2
    out_NF = torch.empty(rows, width, device=both_NF.device, dtype=both_NF.dtype)
    _multiply_gate[(rows, triton.cdiv(width, GATE_COLUMNS))](
        both_NF, out_NF, width, C=GATE_COLUMNS, ACTIVATION=activation, num_warps=4
    )
    return out_NF


def fused_linear(
    x_NK: Tensor, linear: Any, norm: Any = None, activation: str = "", gated: bool = False, added: Tensor | None = None
) -> Tensor:
    """linear(norm(x)), activated if requested, plus a residual; for few texts.

    `gated`: the first half of the outputs, activated, times the second half."""
    rows, inputs = x_NK.shape
    outputs = linear.weight.shape[0] // (2 if gated else 1)
    columns = triton.next_power_of_2(inputs)
    out_NF = torch.empty(rows, outputs, device=x_NK.device, dtype=x_NK.dtype)
    at_once = _rows_per_program(outputs, columns * 2 if gated else columns)
    rms = not isinstance(norm, torch.nn.LayerNorm)
    _fused_linear[(triton.cdiv(outputs, at_once), rows)](
        x_NK,
        linear.weight,
        x_NK if linear.bias is None else linear.bias,
        norm.weight if norm else x_NK,
        x_NK if rms else norm.bias,
        x_NK if added is None else added,
        out_NF,
        outputs,
        norm.eps if norm else 0.0,
        K=inputs,
        C=columns,
        R=at_once,
        NORM=norm is not None,
        RMS=rms,
        BIAS=linear.bias is not None,
        ACTIVATION=activation,
        GATED=gated,
        ADD=added is not None,
        num_warps=LINEAR_WARPS,
    )
    return out_NF


def _rows_per_program(outputs: int, columns: int) -> int:
    """Rows of a matrix per program: a power of two."""
    most = max(1, min(ROWS, TILE // columns, outputs // 256))
    power: int = triton.next_power_of_2(most + 1) // 2
    return power


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
        # Half a head lies between the two channels of a pair.
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
