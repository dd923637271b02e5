"""QKV projection for compiled training: the backward pass joins the three gradients and sums the bias gradient at once.

Shapes in names: N samples, T tokens, E width, H heads, D head width, M = N x T, F = H x 3 x D outputs, grouped by head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from textmill.kernels.matmul_torch import linear


def split_qkv(qkv_NTF: Tensor, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [N, H, T, D] as views."""
    q, k, v = (part.transpose(1, 2) for part in qkv_NTF.view(*qkv_NTF.shape[:2], -1, 3, D).unbind(3))
    return q, k, v


def project_qkv(x_NTE: Tensor, weight_FE: Tensor, bias_F: Tensor, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [N, H, T, D] of a linear layer with tuned matmuls."""
    qkv_NTF = linear(x_NTE, weight_FE, bias_F.detach())  # _Split computes its gradient
    parts: tuple[Tensor, Tensor, Tensor] = _Split.apply(qkv_NTF, bias_F, D)  # type: ignore[no-untyped-call]
    return parts


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_NTF: Tensor, bias_F: Tensor, D: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(bias_F)
        return split_qkv(qkv_NTF, D)

    @staticmethod
    def backward(ctx: Any, dq_NHTD: Tensor, dk_NHTD: Tensor, dv_NHTD: Tensor) -> tuple[Tensor, Tensor, None]:
        (bias_F,) = ctx.saved_tensors
        dqkv_MF, sums_F = join_heads(dq_NHTD, dk_NHTD, dv_NHTD)
        return dqkv_MF.view(len(dq_NHTD), -1, len(bias_F)), sums_F.to(bias_F.dtype), None


@torch.library.custom_op("textmill::join_heads", mutates_args=())
def join_heads(dq_NHTD: Tensor, dk_NHTD: Tensor, dv_NHTD: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the joined QKV matrix [M, F], and its sum over tokens in fp32."""
    dqkv_MF = torch.stack([part.transpose(1, 2) for part in (dq_NHTD, dk_NHTD, dv_NHTD)], 3).flatten(2).flatten(0, 1)
    return dqkv_MF, dqkv_MF.sum(0, dtype=torch.float32)


@join_heads.register_fake
def _(dq_NHTD: Tensor, dk_NHTD: Tensor, dv_NHTD: Tensor) -> tuple[Tensor, Tensor]:
    N, H, T, D = dq_NHTD.shape
    return dq_NHTD.new_empty(N * T, H * 3 * D), dq_NHTD.new_empty(H * 3 * D, dtype=torch.float32)
