"""LayerNorms of a compiled net that trains, each with the stream beside it: backward, where both meet again, is one pass.

What is summed over tokens there are the gradients of the norm's own weights and of two biases whose rows pass through the same place: that
of the matrix which added to the stream before, and of the one that will after. Shapes in names: N samples, T tokens, E width, M = N x T.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

try:
    from textmill.kernels import norms_triton
except ImportError:  # no kernel can be built here
    norms_triton = None  # type: ignore[assignment]


def norm_and_residual(
    x_NTE: Tensor, norm: nn.LayerNorm, before_E: Tensor | None = None, after_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of a stream, and the stream as it is; biases, both or none, are those of which only the gradient is asked for."""
    both: tuple[Tensor, Tensor] = _Parted.apply(x_NTE, norm.weight, norm.bias, before_E, after_E, norm.eps)  # type: ignore[no-untyped-call]
    return both


class _Parted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NTE: Tensor,
        weight_E: Tensor,
        shift_E: Tensor,
        before_E: Tensor | None,
        after_E: Tensor | None,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        x_ME = x_NTE.flatten(0, -2)
        y_ME, means_M1, spreads_M1 = torch.native_layer_norm(x_ME.float(), weight_E.shape, weight_E, shift_E, epsilon)
        ctx.save_for_backward(x_ME, means_M1.flatten(), spreads_M1.flatten(), weight_E)
        ctx.biases = before_E is not None
        return y_ME.to(x_NTE.dtype).view(x_NTE.shape), x_NTE.view_as(x_NTE)

    @staticmethod
    def backward(ctx: Any, dy_NTE: Tensor, stream_NTE: Tensor) -> tuple[Tensor | None, ...]:
        slopes = (slope.contiguous().flatten(0, -2) for slope in (dy_NTE, stream_NTE))
        dx_ME, sums = norm_backward(next(slopes), *ctx.saved_tensors, next(slopes), ctx.biases)
        return (
            dx_ME.view(dy_NTE.shape),
            sums[0],
            sums[1],
            sums[2] if ctx.biases else None,
            sums[3] if ctx.biases else None,
            None,
        )


@torch.library.custom_op("textmill::norm_backward", mutates_args=())
def norm_backward(
    dy_ME: Tensor, x_ME: Tensor, means_M: Tensor, spreads_M: Tensor, weight_E: Tensor, stream_ME: Tensor, biases: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of the inputs, the stream's with it; and in fp32, a row each, those of the norm's weight and shift and of the biases."""
    if x_ME.is_cuda and norms_triton is not None:
        return norms_triton.backward(dy_ME, x_ME, means_M, spreads_M, weight_E, stream_ME, biases)
    slope_ME, spreads_M1 = dy_ME.float(), spreads_M[:, None]
    normed_ME, scaled_ME = (x_ME - means_M[:, None]) * spreads_M1, slope_ME * weight_E
    along_M1 = (scaled_ME * normed_ME).mean(1, keepdim=True)
    dx_ME = (stream_ME + spreads_M1 * (scaled_ME - scaled_ME.mean(1, keepdim=True) - normed_ME * along_M1)).to(
        x_ME.dtype
    )
    summed = [slope_ME * normed_ME, slope_ME, dx_ME, stream_ME]
    return dx_ME, torch.stack([part.sum(0, dtype=torch.float32) for part in (summed if biases else summed[:2])])


@norm_backward.register_fake
def _(
    dy_ME: Tensor, x_ME: Tensor, means_M: Tensor, spreads_M: Tensor, weight_E: Tensor, stream_ME: Tensor, biases: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_ME), x_ME.new_empty(4 if biases else 2, x_ME.shape[1], dtype=torch.float32)
