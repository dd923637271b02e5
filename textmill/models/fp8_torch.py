"""Matrix products in fp8 with a scale a row. Shapes in names: M rows, K summed over, N columns.

The result and the inputs' gradient are fp8 products; the weights' gradient, whose sum runs over the rows, stays in bf16. Scales and
roundings are plain operations: where the net is compiled, they become a part of the kernel that made the numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from textmill.models.products_torch import times

KIND = torch.float8_e4m3fn
"""Three bits of mantissa for all: a scale a row leaves gradients no need of a wider range."""
TINY = 1e-30
"""A row of zeros has this for its greatest."""
MULTIPLE = 16
"""Widths that fp8 products take divide by this."""


Rows8 = tuple[Tensor, Tensor]
"""Rows in fp8 [M, K] and their scales [M, 1]."""


def rows8(x_MK: Tensor) -> Rows8:
    """Each row over its scale, rounded and laid row by row: the greatest number of a row becomes the greatest of the kind."""
    x_MK = x_MK.float()
    scale_M1 = x_MK.abs().amax(1, keepdim=True).clamp_min(TINY) / torch.finfo(KIND).max
    return (x_MK / scale_M1).to(KIND).contiguous(), scale_M1


def product8(a: Rows8, b: Rows8) -> Tensor:
    """a times b's transpose, in bf16."""
    (a_MK, a_M1), (b_NK, b_N1) = a, b
    return torch._scaled_mm(a_MK, b_NK.T, scale_a=a_M1, scale_b=b_N1.view(1, -1), out_dtype=torch.bfloat16, use_fast_accum=True)


def linear8(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """A linear layer without its bias."""
    y_MN: Tensor = _Linear8.apply(x_MK.to(torch.bfloat16), weight_NK)  # type: ignore[no-untyped-call]
    return y_MN


class _Linear8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        return product8(rows8(x_MK), rows8(weight_NK))

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor, Tensor | None]:
        x_MK, weight_NK = ctx.saved_tensors
        slope_NK = times(dy_MN.T, x_MK, weight_NK.dtype) if ctx.needs_input_grad[1] else None
        return product8(rows8(dy_MN), rows8(weight_NK.T)), slope_NK
