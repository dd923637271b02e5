"""The gradient of a LayerNorm's inputs in one Triton kernel, which adds it to the stream's and sums by column what weights ask for.

A row is cut into chunks that a warp or a few take one after the other, so that its sums need no other warps' if it is not wide, and
widths that are no power of two waste nothing.
"""

# mypy: disable-error-code="assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from textmill.models.sums_triton import summed

WARPS, CHUNK, CHUNKS = 4, 256, 3
"""A program's warps, the columns that a warp takes of a row at a time, and the chunks of a row at most."""
PROGRAMS = 264
"""Programs in all, each with sums of its own: two for each of an H200's processors."""


@triton.jit
def _both(even, along, more_even, more_along):  # type: ignore[no-untyped-def]
    return even + more_even, along + more_along


@triton.jit  # type: ignore[untyped-decorator]
def _come(dy, x, stream, row, end, columns, width, C: tl.constexpr, G: tl.constexpr):  # type: ignore[no-untyped-def]
    """Chunks of rows as they lie in memory."""
    slopes, values, passed = (), (), ()
    for chunk in tl.static_range(G):
        place = chunk * C + columns
        here, at = (row < end)[:, None] & (place < width)[None, :], row[:, None] * width + place[None, :]
        slopes += (tl.load(dy + at, mask=here, other=0.0),)
        values += (tl.load(x + at, mask=here, other=0.0),)
        passed += (tl.load(stream + at, mask=here, other=0.0),)
    return slopes, values, passed


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    dy, x, means, spreads, weight, stream, dx, sums, rows, width, each,
    BIASES: tl.constexpr, R: tl.constexpr, C: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, C)
    first = tl.program_id(0).to(tl.int64) * each
    end = tl.minimum(first + each, rows)
    row = first + tl.arange(0, R)
    scale, scales, shifts, befores, afters = (), (), (), (), ()
    for chunk in tl.static_range(G):
        place = chunk * C + columns
        scale += (tl.load(weight + place, mask=place < width, other=0.0).to(tl.float32)[None, :],)
        scales += (tl.zeros([R, C], tl.float32),)
        shifts += (tl.zeros([R, C], tl.float32),)
        befores += (tl.zeros([R, C], tl.float32),)
        afters += (tl.zeros([R, C], tl.float32),)
    slopes, values, passed = _come(dy, x, stream, row, end, columns, width, C, G)
    mean, spread = tl.load(means + row, mask=row < end, other=0.0), tl.load(spreads + row, mask=row < end, other=0.0)
    for _ in range(0, each, R):
        now, slopes_now, values_now, passed_now = row, slopes, values, passed
        spread_now, lower = spread[:, None], (mean * spread)[:, None]
        row += R  # the next are on their way while these are worked on
        slopes, values, passed = _come(dy, x, stream, row, end, columns, width, C, G)
        mean, spread = tl.load(means + row, mask=row < end, other=0.0), tl.load(spreads + row, mask=row < end, other=0.0)
        even, along = tl.zeros([R, C], tl.float32), tl.zeros([R, C], tl.float32)
        for chunk in tl.static_range(G):
            scaled = slopes_now[chunk].to(tl.float32) * scale[chunk]
            even += scaled
            along += scaled * (values_now[chunk].to(tl.float32) * spread_now - lower)
        even, along = tl.reduce((even, along), 1, _both)
        share = spread_now / width  # a division for the row, none for its numbers
        even, along = even[:, None] * share, along[:, None] * share
        more_scales, more_shifts, more_befores, more_afters = (), (), (), ()
        for chunk in tl.static_range(G):
            slope, through = slopes_now[chunk].to(tl.float32), passed_now[chunk].to(tl.float32)
            normed = values_now[chunk].to(tl.float32) * spread_now - lower
            out = through + slope * scale[chunk] * spread_now - even - normed * along
            place = chunk * C + columns
            here = (now < end)[:, None] & (place < width)[None, :]
            tl.store(dx + now[:, None] * width + place[None, :], out.to(dx.dtype.element_ty), mask=here)
            more_scales += (scales[chunk] + slope * normed,)
            more_shifts += (shifts[chunk] + slope,)
            more_befores += (befores[chunk] + out if BIASES else befores[chunk],)
            more_afters += (afters[chunk] + through if BIASES else afters[chunk],)
        scales, shifts, befores, afters = more_scales, more_shifts, more_befores, more_afters
    for chunk in tl.static_range(G):
        place = chunk * C + columns
        own = sums + tl.program_id(0) * ((2 + 2 * BIASES) * width) + place
        tl.store(own, tl.sum(scales[chunk], 0), mask=place < width)
        tl.store(own + width, tl.sum(shifts[chunk], 0), mask=place < width)
        if BIASES:
            tl.store(own + 2 * width, tl.sum(befores[chunk], 0), mask=place < width)
            tl.store(own + 3 * width, tl.sum(afters[chunk], 0), mask=place < width)


def backward(
    dy_ME: Tensor, x_ME: Tensor, means_M: Tensor, spreads_M: Tensor, weight_E: Tensor, stream_ME: Tensor, biases: bool
) -> tuple[Tensor, Tensor]:
    """As norms_torch's op has it; all matrices without gaps."""
    rows, width = x_ME.shape
    across = min(WARPS, triton.next_power_of_2(triton.cdiv(width, CHUNK * CHUNKS)))  # warps that share a row
    down, columns = WARPS // across, CHUNK * across
    dx_ME = torch.empty_like(x_ME)
    programs = min(PROGRAMS, triton.cdiv(rows, down))
    sums = torch.empty(programs, 4 if biases else 2, width, device=x_ME.device)
    given = dy_ME, x_ME, means_M, spreads_M, weight_E, stream_ME, dx_ME, sums, rows, width, triton.cdiv(rows, programs)
    _backward[(programs,)](*given, BIASES=biases, R=down, C=columns, G=triton.cdiv(width, columns), num_warps=WARPS)
    return dx_ME, summed(sums.flatten(1)).view(-1, width)
