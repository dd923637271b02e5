"""Causal cuDNN attention for compiled training that writes the QKV gradients directly into one matrix.

Queries, keys and values are views of one matrix, and the projection needs their gradients as one matrix too. cuDNN
could write them in_place, but torch lets it write three separate tensors, which then have to be joined: 1.7% of a step.
So a dispatch mode hands our views to torch when it allocates the three. This relies on torch's internals, so it is
checked once on a small case. If the check fails, or torch allocates its own memory for some shape, the three
gradients are joined as a fallback.

Shapes in names: N samples, T tokens, E width, H heads, D head width, F = H x 3 x D (grouped by head).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from textmill.kernels.matmul_torch import are_chosen, linear
from textmill.kernels.qkv_torch import join_heads, split

aten = torch.ops.aten
ON_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
BACKWARDS = ("_scaled_dot_product_cudnn_attention_backward", "_cudnn_attention_backward")
"""torch's operators for the gradients; the first calls the second."""
SEPARATE_PLANS = -0.0
"""Dropout probability 0 with another bit pattern. torch caches cuDNN plans per thread by input shapes, input strides and
the bits of this number (`MHAParams` in torch's MHA.cpp), but not by output strides. With -0.0 our plans never mix with
torch's own."""


def is_written(x_NTE: Tensor, layer: nn.Module, D: int) -> bool:
    """True if fused attention applies: a plain linear layer with tuned matmuls, and shapes that cuDNN supports."""
    if type(layer) is not nn.Linear or not are_chosen(x_NTE, layer.weight):
        return False
    kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x_NTE.dtype
    return bool(_cudnn_supports(x_NTE.device, kind, len(layer.weight) // (3 * D), x_NTE.shape[1], D))


def _cudnn_supports(device: torch.device, kind: torch.dtype, heads: int, tokens: int, D: int) -> bool:
    """True if cuDNN attention is enabled and supports these shapes."""
    if torch.are_deterministic_algorithms_enabled() or not torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    parts = split(torch.empty(1, tokens, heads * 3 * D, device=device, dtype=kind, requires_grad=True), D)
    return torch.backends.cuda.can_use_cudnn_attention(torch.backends.cuda.SDPAParams(*parts, None, 0.0, True, False))


# torch.compiler.assume_constant_result would do this too, but importing it loads the compiler with every net.
_cudnn_supports._dynamo_marked_constant = True  # type: ignore[attr-defined]


def attended(x_NTE: Tensor, layer: nn.Linear, D: int) -> Tensor:
    """Attention over the QKV projection of x, heads joined."""
    y_NTE: Tensor = _Attention.apply(linear(x_NTE, layer.weight, layer.bias), D)  # type: ignore[no-untyped-call]
    return y_NTE


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_NTF: Tensor, D: int) -> Tensor:
        y_NTE: Tensor
        y_NTE, logs_NHT = attend(qkv_NTF, D)
        ctx.save_for_backward(qkv_NTF, y_NTE, logs_NHT)
        ctx.D = D
        return y_NTE

    @staticmethod
    def backward(ctx: Any, dy_NTE: Tensor) -> tuple[Tensor, None]:
        dqkv_NTF: Tensor = attend_backward(dy_NTE.contiguous(), *ctx.saved_tensors, ctx.D)
        return dqkv_NTF, None


@torch.library.custom_op("textmill::attend", mutates_args=())
def attend(qkv_NTF: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """Attention output with heads joined, and the log-sum-exp of each query's scores."""
    parts = split(qkv_NTF, D)
    if qkv_NTF.is_cuda:
        y_NHTD, logs, *_ = aten._scaled_dot_product_cudnn_attention(*parts, None, True, 0.0, True)
    else:
        y_NHTD, logs = aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, True)
    return y_NHTD.transpose(1, 2).contiguous().flatten(2), logs.flatten(2).contiguous()


@attend.register_fake
def _(qkv_NTF: Tensor, D: int) -> tuple[Tensor, Tensor]:
    N, T, F = qkv_NTF.shape
    return qkv_NTF.new_empty(N, T, F // 3), qkv_NTF.new_empty(N, F // (3 * D), T, dtype=torch.float32)


@torch.library.custom_op("textmill::attend_backward", mutates_args=())
def attend_backward(dy_NTE: Tensor, qkv_NTF: Tensor, y_NTE: Tensor, logs_NHT: Tensor, D: int) -> Tensor:
    """The gradient of QKV in the memory layout of `qkv_NTF`."""
    given = dy_NTE, qkv_NTF, y_NTE, logs_NHT, D
    return (
        _gradient_in_place(*given)[0]
        if qkv_NTF.is_cuda and _in_place_works(qkv_NTF.device, qkv_NTF.dtype)
        else _gradient_joined(*given)
    )


@attend_backward.register_fake
def _(dy_NTE: Tensor, qkv_NTF: Tensor, y_NTE: Tensor, logs_NHT: Tensor, D: int) -> Tensor:
    return torch.empty_like(qkv_NTF)


class _AllocateInto(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces the tensors that torch allocates for attention gradients by the given ones, in order."""

    def __init__(self, targets: tuple[Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.targets = list(targets)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in BACKWARDS:
            with self:
                return func.redispatch(ON_CUDA, *args, **(kwargs or {}))
        if func is aten.empty_like.default and self.targets and args[0].shape == self.targets[0].shape:
            return self.targets.pop(0)
        return func(*args, **(kwargs or {}))


def _gradients(
    dy_NTE: Tensor, qkv_NTF: Tensor, y_NTE: Tensor, logs_NHT: Tensor, D: int, dropout: float
) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values [N, H, T, D], in memory that torch chooses."""
    dy_NHTD, y_NHTD = (whole.view(*whole.shape[:2], -1, D).transpose(1, 2) for whole in (dy_NTE, y_NTE))
    given, T = (dy_NHTD, *split(qkv_NTF, D), y_NHTD), qkv_NTF.shape[1]
    if not qkv_NTF.is_cuda:
        found: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, logs_NHT, dropout, True
        )
        return found
    seed = torch.empty((), dtype=torch.int64, device=qkv_NTF.device)  # dropout is 0, so its seed is unused
    found = getattr(aten, BACKWARDS[0])(*given, logs_NHT[..., None], seed, seed, None, None, None, T, T, dropout, True)
    return found


def _gradient_joined(dy_NTE: Tensor, qkv_NTF: Tensor, y_NTE: Tensor, logs_NHT: Tensor, D: int) -> Tensor:
    """The QKV gradient, joined from three tensors."""
    dqkv_MF: Tensor = join_heads(*_gradients(dy_NTE, qkv_NTF, y_NTE, logs_NHT, D, 0.0))[0]
    return dqkv_MF.view(qkv_NTF.shape)


def _gradient_in_place(dy_NTE: Tensor, qkv_NTF: Tensor, y_NTE: Tensor, logs_NHT: Tensor, D: int) -> tuple[Tensor, bool]:
    """The QKV gradient, and whether it was written in place; if not, it was joined from three tensors."""
    dqkv_NTF = torch.empty_like(qkv_NTF)
    targets = split(dqkv_NTF, D)
    with _AllocateInto(targets):
        found = _gradients(dy_NTE, qkv_NTF, y_NTE, logs_NHT, D, SEPARATE_PLANS)
    in_place = all(
        one.data_ptr() == place.data_ptr() and one.stride() == place.stride()
        for one, place in zip(found, targets, strict=True)
    )
    return (dqkv_NTF if in_place else join_heads(*found)[0].view_as(qkv_NTF)), in_place


@cache
def _in_place_works(device: torch.device, kind: torch.dtype) -> bool:
    """True if in-place gradients work on this device and equal torch's own, before and after (no cached plan is shared)."""
    generator = torch.Generator(device).manual_seed(1)
    qkv_NTF = torch.randn(2, 128, 2 * 3 * 64, device=device, dtype=kind, generator=generator)
    y_NTE, logs_NHT = attend(qkv_NTF, 64)
    given = torch.randn(y_NTE.shape, device=device, dtype=kind, generator=generator), qkv_NTF, y_NTE, logs_NHT, 64
    try:
        own, (ours, in_place), again = _gradient_joined(*given), _gradient_in_place(*given), _gradient_joined(*given)
    except (RuntimeError, TypeError):  # another torch version with another signature
        return False
    return in_place and all(torch.allclose(one.float(), own.float(), rtol=0.05, atol=0.05) for one in (ours, again))
