"""The small parts of a decoding step as Triton kernels: the residual stream with its LayerNorm, and attention of one new token.

Shapes in names: N texts, E width, H heads, D head width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PLACES, WARPS = 128, 8
"""Places of the cache that attention looks at in one go, and its warps."""


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(x, delta, bias, weight, shift, sums, out, width, epsilon, C: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.arange(0, C)
    inside = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    added = tl.load(delta + at, mask=inside, other=0.0).to(tl.float32) + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    rounded = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + added).to(sums.dtype.element_ty)
    tl.store(sums + at, rounded, mask=inside)
    values = rounded.to(tl.float32)
    centred = tl.where(inside, values - tl.sum(values, 0) / width, 0.0)
    spread = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + epsilon)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(shift + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (centred * spread * scale + given).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(qkv, cache, places, out, heads, length, scale, D: tl.constexpr, C: tl.constexpr, T: tl.constexpr):  # type: ignore[no-untyped-def]
    text, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, C)
    inside = columns < D
    place = tl.load(places + text).to(tl.int32)
    asking = qkv + (text * heads + head) * 3 * D + columns
    query = tl.load(asking, mask=inside, other=0.0).to(tl.float32) * scale
    key = tl.load(asking + D, mask=inside, other=0.0)
    value = tl.load(asking + 2 * D, mask=inside, other=0.0)
    each = heads * 2 * D
    kept = cache + text.to(tl.int64) * length * each + head * 2 * D
    tl.store(kept + place * each + columns, key, mask=inside)
    tl.store(kept + place * each + D + columns, value, mask=inside)
    # The new token sees itself; then what came before it, so many places at a time, each sum held against the largest score so far.
    top = tl.sum(query * key.to(tl.float32), 0)
    total = top * 0.0 + 1.0
    gathered = value.to(tl.float32)
    for start in range(0, place, T):
        rows = start + tl.arange(0, T)
        seen = rows < place
        at = kept + rows[:, None] * each + columns[None, :]
        there = seen[:, None] & inside[None, :]
        keys = tl.load(at, mask=there, other=0.0).to(tl.float32)
        values = tl.load(at + D, mask=there, other=0.0).to(tl.float32)
        scores = tl.where(seen, tl.sum(query[None, :] * keys, 1), float("-inf"))
        larger = tl.maximum(top, tl.max(scores, 0))
        weights, shrink = tl.exp(scores - larger), tl.exp(top - larger)
        gathered = gathered * shrink + tl.sum(weights[:, None] * values, 0)
        total = total * shrink + tl.sum(weights, 0)
        top = larger
    tl.store(out + (text * heads + head) * D + columns, (gathered / total).to(out.dtype.element_ty), mask=inside)


def add_norm(x_NE: Tensor, delta_NE: Tensor, bias_E: Tensor, norm: torch.nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """The stream x + delta + bias, and its LayerNorm."""
    rows, width = x_NE.shape
    sums_NE, out_NE = torch.empty_like(x_NE), torch.empty_like(x_NE)
    _add_norm[(rows,)](
        x_NE, delta_NE, bias_E, norm.weight, norm.bias, sums_NE, out_NE, width, norm.eps, C=triton.next_power_of_2(width), num_warps=4
    )
    return sums_NE, out_NE


def attend(qkv_NH3D: Tensor, cache: Tensor, places_N: Tensor) -> Tensor:
    """Put each text's new key and value at its place in the cache [slots, length, H, 2, D]; what its query finds there, heads joined."""
    rows, heads, _, head = qkv_NH3D.shape
    out_NE = torch.empty(rows, heads * head, device=qkv_NH3D.device, dtype=qkv_NH3D.dtype)
    _attend[(rows, heads)](
        qkv_NH3D, cache, places_N, out_NE, heads, cache.shape[1], head**-0.5, D=head, C=triton.next_power_of_2(head), T=PLACES,
        num_warps=WARPS,
    )  # fmt: skip
    return out_NE
