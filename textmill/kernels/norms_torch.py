"""LayerNorm with the residual stream for compiled training: one backward pass adds up the gradients of both.

The same pass sums two bias gradients over tokens, because their rows are at hand there: the bias of the layer that
added to the stream before the norm, and of the layer that adds to it after.

Shapes in names: N samples, T tokens, E width, M = N x T.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from textmill.kernels.availability import can_run_kernels

try:
    from textmill.kernels import norms_triton
except ImportError:  # Triton kernels cannot be built here
    norms_triton = None  # type: ignore[assignment]


def norm_and_residual(
    x_NTE: Tensor, norm: nn.LayerNorm, before_E: Tensor | None = None, after_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """LayerNorm of the stream, and the stream unchanged. The biases, both or none, only get their gradients here."""
    given = x_NTE, norm.weight, norm.bias, before_E, after_E, norm.eps
    both: tuple[Tensor, Tensor] = _NormAndResidual.apply(*given)  # type: ignore[no-untyped-call]
    return both


class _NormAndResidual(torch.autograd.Function):
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
        y_ME, means_M1, inverse_stds_M1 = torch.native_layer_norm(
            x_ME.float(), weight_E.shape, weight_E, shift_E, epsilon
        )
        ctx.save_for_backward(x_ME, means_M1.flatten(), inverse_stds_M1.flatten(), weight_E)
        ctx.biases = before_E is not None
        return y_ME.to(x_NTE.dtype).view(x_NTE.shape), x_NTE.view_as(x_NTE)

    @staticmethod
    def backward(ctx: Any, dy_NTE: Tensor, dstream_NTE: Tensor) -> tuple[Tensor | None, ...]:
        dy_ME, dstream_ME = (gradient.contiguous().flatten(0, -2) for gradient in (dy_NTE, dstream_NTE))
        dx_ME, sums = norm_backward(dy_ME, *ctx.saved_tensors, dstream_ME, ctx.biases)
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
    dy_ME: Tensor,
    x_ME: Tensor,
    means_M: Tensor,
    inverse_stds_M: Tensor,
    weight_E: Tensor,
    dstream_ME: Tensor,
    biases: bool,
) -> tuple[Tensor, Tensor]:
    """The gradient of x, with the stream's added; and as fp32 rows those of weight, shift and the two biases."""
    if norms_triton is not None and can_run_kernels(x_ME):
        return norms_triton.backward(dy_ME, x_ME, means_M, inverse_stds_M, weight_E, dstream_ME, biases)
    gradient_ME = dy_ME.float()
    inverse_stds_M1 = inverse_stds_M[:, None]
    normed_ME = (x_ME - means_M[:, None]) * inverse_stds_M1
    scaled_ME = gradient_ME * weight_E
    along_M1 = (scaled_ME * normed_ME).mean(1, keepdim=True)
    dx_ME = (dstream_ME + inverse_stds_M1 * (scaled_ME - scaled_ME.mean(1, keepdim=True) - normed_ME * along_M1)).to(
        x_ME.dtype
    )
    summed = [gradient_ME * normed_ME, gradient_ME, dx_ME, dstream_ME]
    return dx_ME, torch.stack([part.sum(0, dtype=torch.float32) for part in (summed if biases else summed[:2])])


@norm_backward.register_fake
def _(
    dy_ME: Tensor,
    x_ME: Tensor,
    means_M: Tensor,
    inverse_stds_M: Tensor,
    weight_E: Tensor,
    dstream_ME: Tensor,
    biases: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_ME), x_ME.new_empty(4 if biases else 2, x_ME.shape[1], dtype=torch.float32)
