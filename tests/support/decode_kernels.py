"""The kernels of textmill/kernels/decode_triton.py as formulas in torch, to compare with and to run steps on a CPU.

In fp32 or fp64: they do not round in between.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from textmill.models.decode_torch import CapturedSlots

MAX_FUSED_TEXTS, MAX_FUSED_WIDTH = 4, 8192
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
    "relu2": lambda x: F.relu(x) ** 2,
}


def embed(ids: Tensor, positions: Tensor, tokens: Tensor, by_position: Tensor | None = None) -> Tensor:
    found = tokens[ids.clamp(min=0)]
    return found if by_position is None else found + by_position[positions]


def normed(norm: Any, x: Tensor) -> Tensor:
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def add_norm(x: Tensor, delta: Tensor, bias: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    total = x + delta if bias is None else x + delta + bias
    return total, normed(norm, total)


def multiply_gate(both: Tensor, activation: str) -> Tensor:
    gate, up = both.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def fused_linear(
    x: Tensor, linear: Any, norm: Any = None, activation: str = "", gated: bool = False, added: Tensor | None = None
) -> Tensor:
    y = F.linear(x if norm is None else normed(norm, x), linear.weight, linear.bias)
    y = multiply_gate(y, activation) if gated else ACTIVATIONS[activation](y)
    return y if added is None else y + added


def attend(
    qkv: Tensor, cache: Tensor, positions: Tensor, arrivals: Tensor, angles: Any = None, norms: Any = None
) -> Tensor:
    """One text after the other; a head of keys serves several heads of queries."""
    assert arrivals.abs().max() == 0
    heads = cache.shape[2]
    q, k, v = qkv.unbind(2) if qkv.ndim == 4 else qkv.split([qkv.shape[1] - 2 * heads, heads, heads], 1)
    if norms is not None:
        q, k = normed(norms[0], q), normed(norms[1], k)
    out = []
    for text, position in enumerate(positions.tolist()):
        query, key = (turned(x[text], angles, position) for x in (q, k))
        cache[text, position] = torch.stack([key, v[text]], 1)
        keys, values = (
            cache[text, : position + 1, :, part].repeat_interleave(len(query) // heads, 1) for part in (0, 1)
        )
        weights = (torch.einsum("hd,thd->ht", query, keys) * query.shape[-1] ** -0.5).softmax(-1)
        out.append(torch.einsum("ht,thd->hd", weights, values).flatten())
    return torch.stack(out)


def turned(x: Tensor, angles: tuple[Tensor, Tensor] | None, position: int) -> Tensor:
    """Pairs of channels as complex numbers, multiplied by cos + i sin."""
    if angles is None:
        return x
    first, second = x.chunk(2, -1)
    product = torch.complex(first, second) * torch.complex(angles[0][position], angles[1][position])
    return torch.cat([product.real, product.imag], -1).to(x.dtype)


def run_without_capture(patch: pytest.MonkeyPatch) -> None:
    """Make captured slots work on a CPU: with the formulas above, and a `graph` that runs the work again."""

    class Again:
        def __init__(self, work: Callable[[], Tensor], result: Tensor) -> None:
            self.work, self.result = work, result

        def replay(self) -> None:
            self.result.copy_(self.work())

    def capture(_: Any, work: Callable[[], Tensor], undo: Callable[[], object]) -> tuple[Any, Tensor]:
        result = work().clone()
        undo()
        return Again(work, result), result

    def addmm_gelu(bias: Tensor, x: Tensor, weight: Tensor, use_gelu: bool) -> Tensor:
        """cuBLAS's GELU has the tanh form, torch's on a CPU has not."""
        assert use_gelu
        return F.gelu(torch.addmm(bias, x, weight), approximate="tanh")

    patch.setattr(CapturedSlots, "kernels", sys.modules[__name__])
    patch.setattr(torch, "_addmm_activation", addmm_gelu)
    patch.setattr(CapturedSlots, "capture", capture)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
