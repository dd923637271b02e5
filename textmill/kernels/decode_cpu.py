"""The functions of decode_triton.py with torch's operations, for decoding in fp32 on a CPU.

There a step of a small net takes as long as it has operations and Python calls. So a net's modules are not called, one
operation does what it can, and what all layers of a step share is computed once, by `begin`.

Shapes in names: N texts, H heads, K heads of keys, D head width, S tokens in the cache, F width of a matrix's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "relu2": lambda x: F.relu(x).square(),
}


class Matrix(NamedTuple):
    """A linear layer. Unlike a module's, its attributes are read in no time."""

    weight: Tensor
    bias: Tensor | None


class Norm(NamedTuple):
    """A LayerNorm of the last dimension, or without a bias an RMSNorm."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x_NE: Tensor) -> Tensor:
        if self.bias is None:
            return torch.rms_norm(x_NE, self.weight.shape, self.weight, self.eps)
        return torch.layer_norm(x_NE, self.weight.shape, self.weight, self.bias, self.eps)


def read_layer(module: Any) -> Matrix | Norm:
    """A linear layer or norm as a tuple."""
    if hasattr(module, "eps"):
        return Norm(module.weight, getattr(module, "bias", None), module.eps)
    return Matrix(module.weight, module.bias)


class Kernels:
    """The functions, for one set of slots with the KV cache [layers, slots, length, K, 2, D]."""

    MAX_FUSED_WIDTH = 2**31
    ACTIVATIONS = ACTIVATIONS

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.positions: list[int] = []
        self.rows_N: Tensor | None = None
        self.mask_N11S: Tensor | None = None
        """Added to attention's scores; None if all texts have the same length."""
        self.angles: tuple[Tensor, Tensor] | None = None
        self.caches: list[tuple[Tensor, Tensor, Tensor]] = []
        """Of each layer: where the new keys and values are stored, and all keys and values of the texts."""

    def begin(self, positions: list[int]) -> None:
        """Prepare a step that adds a token to each of the first slots, at these positions."""
        N = len(positions)
        S = max(positions) + 1
        self.positions = positions
        self.mask_N11S = self.rows_N = self.angles = None
        if N == 1:
            new = self.memory[:, 0, S - 1].unbind()
        else:
            new = self.memory.unbind()
            self.rows_N = torch.arange(N)
            if min(positions) + 1 < S:
                beyond_NS = torch.arange(S) > torch.tensor(positions)[:, None]
                self.mask_N11S = torch.zeros(beyond_NS.shape).masked_fill_(beyond_NS, -torch.inf)[:, None, None]
        keys, values = self.memory[:, :N, :S].permute(4, 0, 1, 3, 2, 5)
        self.caches = list(zip(new, keys.unbind(), values.unbind(), strict=True))

    def embed(self, ids_N: Tensor, positions_N: Tensor, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Token plus position embeddings, if there are any; ids are not below 0 here."""
        found_NE = tokens[ids_N]
        return found_NE if positions is None else found_NE.add_(positions[positions_N])

    def fused_linear(
        self,
        x_NE: Tensor,
        linear: Any,
        norm: Any = None,
        activation: str = "",
        gated: bool = False,
        added: Tensor | None = None,
    ) -> Tensor:
        """linear(norm(x)), activated if requested, plus a residual.

        `gated`: the first half of the outputs, activated, times the second half."""
        if norm is not None:
            x_NE = norm(x_NE)
        y_NF = F.linear(x_NE, linear.weight, linear.bias)
        if gated:
            gate_NF, up_NF = y_NF.chunk(2, -1)
            y_NF = ACTIVATIONS[activation](gate_NF).mul_(up_NF)
        elif activation:
            y_NF = ACTIVATIONS[activation](y_NF)
        return y_NF if added is None else y_NF.add_(added)

    def attend(
        self,
        qkv: Tensor,
        cache: tuple[Tensor, Tensor, Tensor],
        positions_N: Tensor,
        arrivals: Tensor,
        angles: tuple[Tensor, Tensor] | None = None,
        norms: tuple[Any, Any] | None = None,
    ) -> Tensor:
        """Write each text's new key and value into the KV cache; return attention, heads joined."""
        new, k_NKSD, v_NKSD = cache
        N, K, _, D = k_NKSD.shape
        if qkv.ndim == 4:
            q_NHD = qkv[:, :, 0]
            kv_NK2D = qkv[:, :, 1:]
        else:
            q_NHD, k_NKD = self._queries_and_keys(qkv, qkv.shape[1] - 2 * K, angles, norms)
            kv_NK2D = torch.stack((k_NKD, qkv[:, -K:]), 2)
        if N == 1:
            new.copy_(kv_NK2D[0])
        else:
            new[self.rows_N, positions_N] = kv_NK2D
        # The query heads that share a head of keys are the queries of one head: keys are read once, without a copy.
        q_NKGD = q_NHD.reshape(N, K, -1, D)
        y_NKGD = F.scaled_dot_product_attention(q_NKGD, k_NKSD, v_NKSD, attn_mask=self.mask_N11S)
        return y_NKGD.reshape(N, -1)

    def _queries_and_keys(
        self, qkv_NHD: Tensor, heads: int, angles: tuple[Tensor, Tensor] | None, norms: tuple[Any, Any] | None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys of all heads, normalised and turned by the angles of their positions."""
        K = (qkv_NHD.shape[1] - heads) // 2
        both_NHD = qkv_NHD[:, : heads + K]
        if norms is not None:
            parts = both_NHD[:, :heads], both_NHD[:, heads:]
            both_NHD = torch.cat([norm(part) for part, norm in zip(parts, norms, strict=True)], 1)
        if angles is not None:
            if self.angles is None:  # those of the step's positions, the same in every layer
                cos_ND, sin_ND = (table[self.positions] for table in angles)
                self.angles = torch.cat([cos_ND, cos_ND], 1)[:, None], torch.cat([-sin_ND, sin_ND], 1)[:, None]
            cos, sin = self.angles
            both_NHD = torch.addcmul(both_NHD * cos, both_NHD.roll(both_NHD.shape[2] // 2, 2), sin)
        return both_NHD[:, :heads], both_NHD[:, heads:]
