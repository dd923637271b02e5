"""GPT-2's net in torch. Shapes in names: N samples, T tokens, E width, H heads, D head width, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from textmill.kernels.attention_torch import can_use_fused_attention, fused_attention, project_qkv
from textmill.kernels.dropout_torch import drop
from textmill.kernels.fp8_torch import fp8_mlp
from textmill.kernels.gelu_torch import bias_gelu
from textmill.kernels.matmul_torch import add_linear, linear, use_tuned_matmul
from textmill.kernels.norms_torch import norm_and_residual
from textmill.kernels.triton_support import HAS_TRITON
from textmill.models.activations import GELUS
from textmill.models.base_torch import ACTIVATIONS, BaseBlock, BaseNet, new_embedding, to_matmul_dtype
from textmill.models.cache_torch import Cache
from textmill.models.gpt2.facts import Shape
from textmill.models.lora_torch import apply_linear
from textmill.models.masks_torch import (
    Mask,
    causal_mask,
    document_block_mask,
    document_mask,
    token_positions,
    use_block_mask,
)


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values are interleaved by head, so that ranks can divide heads."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(shape.width, 3 * shape.width)
        self.c_proj = nn.Linear(shape.width, shape.width)
        self.shape = shape
        self.layer = layer
        self.heads_part = 0
        """Which of several equal parts of the heads a tensor-parallel rank has."""

    def forward(
        self,
        x_NTE: Tensor,
        keys_N: Tensor | None,
        cache: Cache | None,
        mask: Mask | None,
        stream_NTE: Tensor | None = None,
    ) -> Tensor:
        """Attention's output, plus the residual stream if given; its last bias gets its gradient in the next norm."""
        y_NTE = self._attend(x_NTE, keys_N, cache, mask)
        if stream_NTE is None:
            return apply_linear(self.c_proj, y_NTE, keys_N)
        return add_linear(stream_NTE, self.c_proj, y_NTE)

    def _attend(self, x_NTE: Tensor, keys_N: Tensor | None, cache: Cache | None, mask: Mask | None) -> Tensor:
        """Attention's weighted values, heads joined."""
        N, T, _ = x_NTE.shape
        dropout = self.shape.attention_dropout
        D = self.shape.width // self.shape.heads
        if (
            mask is None
            and cache is None
            and (keys_N is None or not dropout)
            and can_use_fused_attention(x_NTE, self.c_attn, D)
        ):
            return fused_attention(x_NTE, self.c_attn, D)
        q_NHTD, k_NHTD, v_NHTD = self._split(x_NTE, keys_N)
        if cache is not None:
            y_NHTD = cache.attend(self.layer, q_NHTD, k_NHTD, v_NHTD)
        elif isinstance(mask, BlockMask):
            y_NHTD = flex_attention(q_NHTD, k_NHTD, v_NHTD, block_mask=mask)
        elif keys_N is not None and dropout:
            y_NHTD = self._attention_weights(q_NHTD, k_NHTD, dropout, keys_N, mask) @ v_NHTD
        elif mask is not None:
            y_NHTD = F.scaled_dot_product_attention(q_NHTD, k_NHTD, v_NHTD, attn_mask=mask)
        else:
            y_NHTD = F.scaled_dot_product_attention(q_NHTD, k_NHTD, v_NHTD, is_causal=True)
        return y_NHTD.transpose(1, 2).reshape(N, T, -1)

    def _split(self, x_NTE: Tensor, keys_N: Tensor | None) -> tuple[Tensor, ...]:
        """Queries, keys and values of every head."""
        D = self.shape.width // self.shape.heads
        if type(self.c_attn) is nn.Linear and use_tuned_matmul(x_NTE, self.c_attn.weight):
            return project_qkv(x_NTE, self.c_attn.weight, self.c_attn.bias, D)
        qkv = apply_linear(self.c_attn, x_NTE, keys_N).view(*x_NTE.shape[:2], -1, 3, D)
        return tuple(part.transpose(1, 2) for part in qkv.unbind(3))

    def _attention_weights(
        self, q_NHTD: Tensor, k_NHTD: Tensor, dropout: float, keys_N: Tensor, mask_N1TT: Tensor | None
    ) -> Tensor:
        """Explicit attention weights, for dropout on them."""
        scores = (q_NHTD @ k_NHTD.transpose(2, 3)) * q_NHTD.shape[-1] ** -0.5
        mask = causal_mask(scores.shape[2], scores.device) if mask_N1TT is None else mask_N1TT
        scores = scores.masked_fill(~mask, float("-inf"))
        return drop(scores.softmax(-1, dtype=torch.float32), dropout, keys_N, 1, self.heads_part).to(q_NHTD.dtype)


class MLP(nn.Module):
    """Two matrices and an activation between them, usually a GELU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.width, shape.inner)
        self.c_proj = nn.Linear(shape.inner, shape.width)
        self.approximate = {"gelu_new": "tanh", "gelu": "none"}.get(shape.activation, "")
        """The form of GELU; empty if the activation is another one."""
        self.activation = None if self.approximate else ACTIVATIONS[shape.activation]
        self.fp8 = False

    def forward(self, x_NTE: Tensor, keys_N: Tensor | None = None, stream_NTE: Tensor | None = None) -> Tensor:
        """The MLP's output, plus the residual stream if given; its last bias gets its gradient in the norm before."""
        if self.fp8 and torch.is_grad_enabled():
            y_NTE = self._in_fp8(x_NTE.flatten(0, -2)).view(x_NTE.shape)
            bias_E = self.c_proj.bias.to(y_NTE.dtype)
            return y_NTE + bias_E if stream_NTE is None else stream_NTE + (y_NTE + bias_E.detach())
        y_NTF = self.inner(x_NTE, keys_N)
        if stream_NTE is None:
            return apply_linear(self.c_proj, y_NTF, keys_N)
        return add_linear(stream_NTE, self.c_proj, y_NTF)

    def _in_fp8(self, x_ME: Tensor) -> Tensor:
        return fp8_mlp(x_ME, self.c_fc.weight, self.c_fc.bias, self.c_proj.weight, self.approximate == "tanh")

    def inner(self, x_NTE: Tensor, keys_N: Tensor | None = None) -> Tensor:
        """The activations between the two matrices."""
        if self.activation is not None:
            return self.activation(apply_linear(self.c_fc, x_NTE, keys_N))
        if HAS_TRITON and x_NTE.is_cuda and torch.is_grad_enabled() and type(self.c_fc) is nn.Linear:
            x_NTF = linear(x_NTE, self.c_fc.weight, None)
            y_MF: Tensor = bias_gelu(x_NTF.flatten(0, -2), self.c_fc.bias, self.approximate == "tanh")
            return y_MF.view(x_NTF.shape)
        return F.gelu(apply_linear(self.c_fc, x_NTE, keys_N), approximate=self.approximate)


class Block(BaseBlock):
    """Pre-LayerNorm attention and MLP, each added to the residual stream."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width, shape.epsilon)
        self.attn = Attention(shape, layer)
        self.ln_2 = nn.LayerNorm(shape.width, shape.epsilon)
        self.mlp = MLP(shape)
        self.dropout = shape.residual_dropout
        self.tokens_part = 0
        """Which of several equal parts of the tokens a sequence-parallel rank has."""

    def compute(self, x_NTE: Tensor, keys_N: Tensor | None, cache: Cache | None, context: Mask | None) -> Tensor:
        """The residual stream after this block; the context is the mask."""
        if (keys_N is None or not self.dropout) and self._adds_in_matmul(x_NTE):
            y_NTE, x_NTE = norm_and_residual(x_NTE, self.ln_1)
            x_NTE = self.attn(y_NTE, keys_N, cache, context, x_NTE)
            y_NTE, x_NTE = norm_and_residual(x_NTE, self.ln_2, self.attn.c_proj.bias, self.mlp.c_proj.bias)
            out: Tensor = self.mlp(y_NTE, keys_N, x_NTE)
            return out
        y_NTE = self.attn(self.ln_1(x_NTE), keys_N, cache, context)
        x_NTE = x_NTE + drop(y_NTE, self.dropout, keys_N, 2, self.tokens_part)
        return x_NTE + drop(self.mlp(self.ln_2(x_NTE), keys_N), self.dropout, keys_N, 3, self.tokens_part)

    def _adds_in_matmul(self, x_NTE: Tensor) -> bool:
        """True if the last matmul of attention and MLP adds the residual stream itself: tuned matmuls, no adapter."""
        plain = all(type(half.c_proj) is nn.Linear for half in (self.attn, self.mlp))
        return plain and use_tuned_matmul(x_NTE, self.attn.c_proj.weight)


class Net(BaseNet):
    """GPT-2, with learned positions and a tied or untied head."""

    shape: Shape
    fp8_activations = GELUS

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.wte = new_embedding(shape.padded_vocab, shape.width)
        self.wpe = new_embedding(shape.positions, shape.width)
        self.h = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width, shape.epsilon)
        self.lm_head = nn.Linear(shape.width, shape.padded_vocab, bias=False) if shape.untied else None
        self.tokens_part = 0

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks, first to last."""
        return self.h

    @property
    def embedding(self) -> nn.Embedding:
        """The token embedding, with its padding rows."""
        return self.wte

    @property
    def head(self) -> Tensor:
        """The head's own weights, or those of the embedding that it is tied to."""
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def begin(
        self, ids_NT: Tensor, keys_N: Tensor | None, positions_NT: Tensor | None, documents_NT: Tensor | None
    ) -> tuple[Tensor, Mask | None]:
        """The residual stream before the first block, and the mask."""
        mask = None if documents_NT is None else self._mask(documents_NT, keys_N)
        positions = token_positions(ids_NT, positions_NT, documents_NT)
        x_NTE = to_matmul_dtype(self.wte(ids_NT) + self.wpe(positions))
        return drop(x_NTE, self.shape.embedding_dropout, keys_N, 0, self.tokens_part), mask

    def end(self, x_NTE: Tensor) -> Tensor:
        """The last LayerNorm."""
        return to_matmul_dtype(self.ln_f(x_NTE))

    def _mask(self, documents_NT: Tensor, keys_N: Tensor | None) -> Mask:
        """The mask inside documents; attention dropout and activation checkpointing need the explicit mask."""
        explicit = self.recompute or (keys_N is not None and self.shape.attention_dropout)
        blocks = not explicit and use_block_mask(documents_NT, self.shape.width // self.shape.heads)
        return document_block_mask(documents_NT) if blocks else document_mask(documents_NT)
