"""Causal cuDNN attention for compiled training that writes the QKV gradients directly into one matrix.

Queries, keys and values are views of one matrix, and the projection needs their gradients as one matrix too. cuDNN
could write into views of it, but torch allocates three separate tensors, which then have to be copied into one: 1.7% of
a step. So a dispatch mode intercepts these allocations and returns views of one matrix. This relies on torch's
internals, so it is checked once on a small case. If the check fails, or the allocations of some shape are not
intercepted, the three gradients are copied into one matrix as a fallback.

Shapes in names: N samples, T tokens, E width, H heads, D head width, F = H x 3 x D (grouped by head).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from textmill.kernels.matmul_torch import linear, use_tuned_matmul
from textmill.kernels.qkv_torch import join_heads, split_qkv

aten = torch.ops.aten
CUDA_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
BACKWARD_OPERATORS = ("_scaled_dot_product_cudnn_attention_backward", "_cudnn_attention_backward")
"""torch's operators that compute the gradients; the first calls the second."""
NEGATIVE_ZERO_DROPOUT = -0.0
"""Dropout probability 0 with another bit pattern. torch caches cuDNN execution plans per thread. The cache key contains
input shapes, input strides and the bits of this number (`MHAParams` in torch's MHA.cpp), but no output strides. With
-0.0, plans for in-place gradients have keys of their own, so torch never uses them for its own tensors."""


def can_use_fused_attention(x_NTE: Tensor, layer: nn.Module, D: int) -> bool:
    """True if `layer` is exactly nn.Linear (no LoRA adapter) with tuned matmuls, and cuDNN supports the shapes."""
    if type(layer) is not nn.Linear or not use_tuned_matmul(x_NTE, layer.weight):
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x_NTE.dtype
    return bool(_cudnn_supports(x_NTE.device, dtype, len(layer.weight) // (3 * D), x_NTE.shape[1], D))


def _cudnn_supports(device: torch.device, dtype: torch.dtype, heads: int, tokens: int, D: int) -> bool:
    """True if cuDNN attention is enabled and supports these shapes."""
    enabled = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    if torch.are_deterministic_algorithms_enabled() or not enabled:
        return False
    q_k_v = split_qkv(torch.empty(1, tokens, heads * 3 * D, device=device, dtype=dtype, requires_grad=True), D)
    return torch.backends.cuda.can_use_cudnn_attention(torch.backends.cuda.SDPAParams(*q_k_v, None, 0.0, True, False))


# torch.compiler.assume_constant_result sets this too, but it imports the compiler, even for nets that are not compiled.
_cudnn_supports._dynamo_marked_constant = True  # type: ignore[attr-defined]


def fused_attention(x_NTE: Tensor, layer: nn.Linear, D: int) -> Tensor:
    """Attention over the QKV projection of x, with the heads concatenated."""
    y_NTE: Tensor = _Attention.apply(linear(x_NTE, layer.weight, layer.bias), D)  # type: ignore[no-untyped-call]
    return y_NTE


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_NTF: Tensor, D: int) -> Tensor:
        y_NTE: Tensor
        y_NTE, logsumexp_NHT = attend(qkv_NTF, D)
        ctx.save_for_backward(qkv_NTF, y_NTE, logsumexp_NHT)
        ctx.D = D
        return y_NTE

    @staticmethod
    def backward(ctx: Any, dy_NTE: Tensor) -> tuple[Tensor, None]:
        dqkv_NTF: Tensor = attend_backward(dy_NTE.contiguous(), *ctx.saved_tensors, ctx.D)
        return dqkv_NTF, None


@torch.library.custom_op("textmill::attend", mutates_args=())
def attend(qkv_NTF: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """The attention output with the heads concatenated, and the log-sum-exp of each query's scores."""
    q_k_v = split_qkv(qkv_NTF, D)
    if qkv_NTF.is_cuda:
        y_NHTD, logsumexp, *_ = aten._scaled_dot_product_cudnn_attention(*q_k_v, None, True, 0.0, True)
    else:
        y_NHTD, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(*q_k_v, 0.0, True)
    return y_NHTD.transpose(1, 2).contiguous().flatten(2), logsumexp.flatten(2).contiguous()


@attend.register_fake
def _(qkv_NTF: Tensor, D: int) -> tuple[Tensor, Tensor]:
    N, T, F = qkv_NTF.shape
    return qkv_NTF.new_empty(N, T, F // 3), qkv_NTF.new_empty(N, F // (3 * D), T, dtype=torch.float32)


@torch.library.custom_op("textmill::attend_backward", mutates_args=())
def attend_backward(dy_NTE: Tensor, qkv_NTF: Tensor, y_NTE: Tensor, logsumexp_NHT: Tensor, D: int) -> Tensor:
    """The gradient of QKV in the memory layout of `qkv_NTF`."""
    arguments = dy_NTE, qkv_NTF, y_NTE, logsumexp_NHT, D
    return (
        _gradient_in_place(*arguments)[0]
        if qkv_NTF.is_cuda and _in_place_works(qkv_NTF.device, qkv_NTF.dtype)
        else _gradient_joined(*arguments)
    )


@attend_backward.register_fake
def _(dy_NTE: Tensor, qkv_NTF: Tensor, y_NTE: Tensor, logsumexp_NHT: Tensor, D: int) -> Tensor:
    return torch.empty_like(qkv_NTF)


class _AllocateInto(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, torch's allocations for the attention gradients return `targets`, in order."""

    def __init__(self, targets: tuple[Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.targets = list(targets)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in BACKWARD_OPERATORS:
            with self:
                return func.redispatch(CUDA_KEY, *args, **(kwargs or {}))
        if func is aten.empty_like.default and self.targets and args[0].shape == self.targets[0].shape:
            return self.targets.pop(0)
        return func(*args, **(kwargs or {}))


def _gradients(
    dy_NTE: Tensor, qkv_NTF: Tensor, y_NTE: Tensor, logsumexp_NHT: Tensor, D: int, dropout: float
) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values [N, H, T, D], in memory that torch allocates."""
    dy_NHTD, y_NHTD = (joined.view(*joined.shape[:2], -1, D).transpose(1, 2) for joined in (dy_NTE, y_NTE))
    arguments = (dy_NHTD, *split_qkv(qkv_NTF, D), y_NHTD)
    T = qkv_NTF.shape[1]
    if not qkv_NTF.is_cuda:
        gradients: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *arguments, logsumexp_NHT, dropout, True
        )
        return gradients
    seed = torch.empty((), dtype=torch.int64, device=qkv_NTF.device)  # dropout is 0, so its seed is unused
    gradients = getattr(aten, BACKWARD_OPERATORS[0])(
        *arguments, logsumexp_NHT[..., None], seed, seed, None, None, None, T, T, dropout, True
    )
    return gradients


def _gradient_joined(dy_NTE: Tensor, qkv_NTF: Tensor, y_NTE: Tensor, logsumexp_NHT: Tensor, D: int) -> Tensor:
    """The QKV gradient, copied together from three tensors."""
    dqkv_MF: Tensor = join_heads(*_gradients(dy_NTE, qkv_NTF, y_NTE, logsumexp_NHT, D, 0.0))[0]
    return dqkv_MF.view(qkv_NTF.shape)


def _gradient_in_place(
    dy_NTE: Tensor, qkv_NTF: Tensor, y_NTE: Tensor, logsumexp_NHT: Tensor, D: int
) -> tuple[Tensor, bool]:
    """The QKV gradient, and whether cuDNN wrote it in place; if not, it was copied together from three tensors."""
    dqkv_NTF = torch.empty_like(qkv_NTF)
    targets = split_qkv(dqkv_NTF, D)
    with _AllocateInto(targets):
        gradients = _gradients(dy_NTE, qkv_NTF, y_NTE, logsumexp_NHT, D, NEGATIVE_ZERO_DROPOUT)
    in_place = all(
        gradient.data_ptr() == target.data_ptr() and gradient.stride() == target.stride()
        for gradient, target in zip(gradients, targets, strict=True)
    )
    return (dqkv_NTF if in_place else join_heads(*gradients)[0].view_as(qkv_NTF)), in_place


@cache
def _in_place_works(device: torch.device, dtype: torch.dtype) -> bool:
    """True if gradients can be written in place here and equal torch's.

    torch's are computed before and after, which shows that torch does not use the plan for in-place gradients.
    """
    generator = torch.Generator(device).manual_seed(1)
    qkv_NTF = torch.randn(2, 128, 2 * 3 * 64, device=device, dtype=dtype, generator=generator)
    y_NTE, logsumexp_NHT = attend(qkv_NTF, 64)
    dy_NTE = torch.randn(y_NTE.shape, device=device, dtype=dtype, generator=generator)
    arguments = dy_NTE, qkv_NTF, y_NTE, logsumexp_NHT, 64
    try:
        reference = _gradient_joined(*arguments)
        written_in_place, in_place = _gradient_in_place(*arguments)
        reference_after = _gradient_joined(*arguments)
    except (RuntimeError, TypeError):  # another torch version with another signature
        return False
    return in_place and all(
        torch.allclose(gradient.float(), reference.float(), rtol=0.05, atol=0.05)
        for gradient in (written_in_place, reference_after)
    )
