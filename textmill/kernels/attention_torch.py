"""Causal attention of a compiled net that trains, by cuDNN: its gradients are written where the projection's products read them.

Queries, keys and values are views of one matrix, and their gradients are wanted as such a matrix too. cuDNN could write them there, but
torch has it write three tensors of its own, which had to be joined: 1.7% of a step. So torch is given our views where it takes memory for
the three. What is relied on for that is tried once with a small case; where it does not hold, or torch takes memory of its own for some
shape after all, the three are joined as before.

Shapes in names: N samples, T tokens, E width, H heads, D head width, F = H x 3 x D, which stand by head.
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
"""What torch makes the gradients with, one inside the other."""
OUR_OWN = -0.0
"""The share that dropout takes: none. Each thread keeps cuDNN's plans by the shapes and strides of what they read and by the bits of this
number (`MHAParams` in torch's MHA.cpp), not by where they write. So under it a shape is always written into our memory, or never."""


def is_written(x_NTE: Tensor, layer: nn.Module, D: int) -> bool:
    """Whether attention writes its gradients for a projection to read: where that is plain, its products are chosen, and cuDNN can."""
    if type(layer) is not nn.Linear or not are_chosen(x_NTE, layer.weight):
        return False
    kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x_NTE.dtype
    return bool(_is_cudnns(x_NTE.device, kind, len(layer.weight) // (3 * D), x_NTE.shape[1], D))


def _is_cudnns(device: torch.device, kind: torch.dtype, heads: int, tokens: int, D: int) -> bool:
    """Whether cuDNN makes attention of such shapes, and may be asked."""
    if torch.are_deterministic_algorithms_enabled() or not torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    parts = split(torch.empty(1, tokens, heads * 3 * D, device=device, dtype=kind, requires_grad=True), D)
    return torch.backends.cuda.can_use_cudnn_attention(torch.backends.cuda.SDPAParams(*parts, None, 0.0, True, False))


# A constant to the compiler. As torch.compiler.assume_constant_result says it, which would load the compiler with every net.
_is_cudnns._dynamo_marked_constant = True  # type: ignore[attr-defined]


def attended(x_NTE: Tensor, layer: nn.Linear, D: int) -> Tensor:
    """What attention makes of a projection of x, whose products are chosen."""
    y_NTE: Tensor = _Attended.apply(linear(x_NTE, layer.weight, layer.bias), D)  # type: ignore[no-untyped-call]
    return y_NTE


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_NTF: Tensor, D: int) -> Tensor:
        y_NTE: Tensor
        y_NTE, logs_NHT = attend(qkv_NTF, D)
        ctx.save_for_backward(qkv_NTF, y_NTE, logs_NHT)
        ctx.D = D
        return y_NTE

    @staticmethod
    def backward(ctx: Any, dy_NTE: Tensor) -> tuple[Tensor, None]:
        slope_NTF: Tensor = attend_backward(dy_NTE.contiguous(), *ctx.saved_tensors, ctx.D)
        return slope_NTF, None


@torch.library.custom_op("textmill::attend", mutates_args=())
def attend(qkv_NTF: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """The values that each token's query finds, heads joined, and the logarithms of the sums that chances were divided by."""
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
    """The gradient of queries, keys and values, as these lie."""
    given = dy_NTE, qkv_NTF, y_NTE, logs_NHT, D
    return _written(*given)[0] if qkv_NTF.is_cuda and _are_written(qkv_NTF.device, qkv_NTF.dtype) else _joined(*given)


@attend_backward.register_fake
def _(dy_NTE: Tensor, qkv_NTF: Tensor, y_NTE: Tensor, logs_NHT: Tensor, D: int) -> Tensor:
    return torch.empty_like(qkv_NTF)


class _Into(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tensors that torch makes for gradients of attention are ours, one after the other."""

    def __init__(self, places: tuple[Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places = list(places)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in BACKWARDS:
            with self:
                return func.redispatch(ON_CUDA, *args, **(kwargs or {}))
        if func is aten.empty_like.default and self.places and args[0].shape == self.places[0].shape:
            return self.places.pop(0)
        return func(*args, **(kwargs or {}))


def _gradients(
    dy_NTE: Tensor, qkv_NTF: Tensor, y_NTE: Tensor, logs_NHT: Tensor, D: int, dropout: float
) -> tuple[Tensor, ...]:
    """Those of queries, keys and values [N, H, T, D], where torch has them written."""
    dy_NHTD, y_NHTD = (whole.view(*whole.shape[:2], -1, D).transpose(1, 2) for whole in (dy_NTE, y_NTE))
    given, T = (dy_NHTD, *split(qkv_NTF, D), y_NHTD), qkv_NTF.shape[1]
    if not qkv_NTF.is_cuda:
        found: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, logs_NHT, dropout, True
        )
        return found
    seed = torch.empty((), dtype=torch.int64, device=qkv_NTF.device)  # dropout's, which there is none of
    found = getattr(aten, BACKWARDS[0])(*given, logs_NHT[..., None], seed, seed, None, None, None, T, T, dropout, True)
    return found


def _joined(dy_NTE: Tensor, qkv_NTF: Tensor, y_NTE: Tensor, logs_NHT: Tensor, D: int) -> Tensor:
    """The gradient as one, joined from the three."""
    whole_MF: Tensor = join_heads(*_gradients(dy_NTE, qkv_NTF, y_NTE, logs_NHT, D, 0.0))[0]
    return whole_MF.view(qkv_NTF.shape)


def _written(dy_NTE: Tensor, qkv_NTF: Tensor, y_NTE: Tensor, logs_NHT: Tensor, D: int) -> tuple[Tensor, bool]:
    """The gradient as one, and whether the three were written into it; else it is joined from them."""
    whole_NTF = torch.empty_like(qkv_NTF)
    places = split(whole_NTF, D)
    with _Into(places):
        found = _gradients(dy_NTE, qkv_NTF, y_NTE, logs_NHT, D, OUR_OWN)
    there = all(
        one.data_ptr() == place.data_ptr() and one.stride() == place.stride()
        for one, place in zip(found, places, strict=True)
    )
    return (whole_NTF if there else join_heads(*found)[0].view_as(qkv_NTF)), there


@cache
def _are_written(device: torch.device, kind: torch.dtype) -> bool:
    """Whether gradients are written into our memory, and torch's own calls and ours, in turns, give the same: no plan serves both."""
    dice = torch.Generator(device).manual_seed(1)
    qkv_NTF = torch.randn(2, 128, 2 * 3 * 64, device=device, dtype=kind, generator=dice)
    y_NTE, logs_NHT = attend(qkv_NTF, 64)
    given = torch.randn(y_NTE.shape, device=device, dtype=kind, generator=dice), qkv_NTF, y_NTE, logs_NHT, 64
    try:
        own, (ours, there), again = _joined(*given), _written(*given), _joined(*given)
    except (RuntimeError, TypeError):  # this torch is called in another way
        return False
    return there and all(torch.allclose(one.float(), own.float(), rtol=0.05, atol=0.05) for one in (ours, again))
