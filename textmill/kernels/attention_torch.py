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
from textmill.kernels.triton_support import can_run_kernels, column_sums, tl, triton

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
    if can_run_kernels(dq_NHTD):
        return _run_join(dq_NHTD, dk_NHTD, dv_NHTD)
    dqkv_MF = torch.stack([part.transpose(1, 2) for part in (dq_NHTD, dk_NHTD, dv_NHTD)], 3).flatten(2).flatten(0, 1)
    return dqkv_MF, dqkv_MF.sum(0, dtype=torch.float32)


@join_heads.register_fake
def _join_heads_fake(dq_NHTD: Tensor, dk_NHTD: Tensor, dv_NHTD: Tensor) -> tuple[Tensor, Tensor]:
    N, H, T, D = dq_NHTD.shape
    return dq_NHTD.new_empty(N * T, H * 3 * D), dq_NHTD.new_empty(H * 3 * D, dtype=torch.float32)


COLUMNS = 128
ROWS = 8
WARPS = 4
"""Columns per program (of each of Q, K, V), tokens per iteration, and warps."""
PROGRAMS = 660
"""Number of programs, each with its own sums: as many as an H200 runs at once, so that they end together."""


@triton.jit
def _load_rows(of, row, valid, tokens, h, d, by_n, by_h, by_t, by_d):  # type: ignore[no-untyped-def]
    """Load rows of one of the three, with any strides."""
    return tl.load(
        of + (row // tokens * by_n + row % tokens * by_t)[:, None] + (h * by_h + d * by_d)[None, :],
        mask=valid,
        other=0.0,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    dq,
    dk,
    dv,
    out,
    sums,
    rows,
    tokens,
    width,
    qn,
    qh,
    qt,
    qd,
    kn,
    kh,
    kt,
    kd,
    vn,
    vh,
    vt,
    vd,
    D: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Programs interleave rows, so that together they read memory from start to end."""
    columns = tl.program_id(1) * C + tl.arange(0, C)
    inside = (columns < width)[None, :]
    h = columns // D
    d = columns % D
    target = h * (3 * D) + d
    total_q = tl.zeros([R, C], tl.float32)
    total_k = tl.zeros([R, C], tl.float32)
    total_v = tl.zeros([R, C], tl.float32)
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    valid = (row < rows)[:, None] & inside
    q = _load_rows(dq, row, valid, tokens, h, d, qn, qh, qt, qd)
    k = _load_rows(dk, row, valid, tokens, h, d, kn, kh, kt, kd)
    v = _load_rows(dv, row, valid, tokens, h, d, vn, vh, vt, vd)
    for _ in range(tl.program_id(0) * R, rows, tl.num_programs(0) * R):
        q_now = q
        k_now = k
        v_now = v
        valid_now = valid
        at = row[:, None] * (3 * width) + target[None, :]
        row += tl.num_programs(0) * R  # prefetch the next rows
        valid = (row < rows)[:, None] & inside
        q = _load_rows(dq, row, valid, tokens, h, d, qn, qh, qt, qd)
        k = _load_rows(dk, row, valid, tokens, h, d, kn, kh, kt, kd)
        v = _load_rows(dv, row, valid, tokens, h, d, vn, vh, vt, vd)
        tl.store(out + at, q_now, mask=valid_now)
        tl.store(out + at + D, k_now, mask=valid_now)
        tl.store(out + at + 2 * D, v_now, mask=valid_now)
        total_q += q_now.to(tl.float32)
        total_k += k_now.to(tl.float32)
        total_v += v_now.to(tl.float32)
    own = sums + tl.program_id(0) * (3 * width) + target
    tl.store(own, tl.sum(total_q, 0), mask=columns < width)
    tl.store(own + D, tl.sum(total_k, 0), mask=columns < width)
    tl.store(own + 2 * D, tl.sum(total_v, 0), mask=columns < width)


def _run_join(dq_NHTD: Tensor, dk_NHTD: Tensor, dv_NHTD: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the projection's output [tokens, heads x 3 x head width], and its column sums in fp32."""
    N, H, T, D = dq_NHTD.shape
    rows = N * T
    width = H * D
    out = dq_NHTD.new_empty(rows, 3 * width)
    blocks = triton.cdiv(width, COLUMNS)
    programs = min(max(1, PROGRAMS // blocks), triton.cdiv(rows, ROWS))
    sums = torch.empty(programs, 3 * width, device=out.device)
    strides = *dq_NHTD.stride(), *dk_NHTD.stride(), *dv_NHTD.stride()
    given = dq_NHTD, dk_NHTD, dv_NHTD, out, sums, rows, T, width, *strides
    _join[programs, blocks](*given, D=D, R=ROWS, C=COLUMNS, num_warps=WARPS)
    return out, column_sums(sums)
