"""Triton kernels for a decoding step: everything between the matmuls and, for few texts, the matmuls too.

Shapes in names: N texts, E width, K columns of a matrix, F its rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from textmill.kernels.decode_attention_triton import attend
from textmill.kernels.require_triton import tl, triton

__all__ = [
    "ACTIVATIONS",
    "MAX_FUSED_TEXTS",
    "MAX_FUSED_WIDTH",
    "add_norm",
    "attend",
    "embed",
    "fused_linear",
    "multiply_gate",
]

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
