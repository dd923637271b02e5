"""GPT-2's net in torch. Shapes in names: N samples, T tokens, E width, H heads, D head width."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from textmill.models.base_torch import (
    AttentionDropout,
    BaseBlock,
    BaseNet,
    Context,
    Dropout,
    Residual,
    add_fp8_mlp,
    add_linear,
    attention,
    linear_and_activation,
    new_embedding,
    norm_and_residual,
    split_heads,
    to_matmul_dtype,
    token_positions,
)
from textmill.models.gpt2.family import Shape
from textmill.models.hf_config import GELUS


class Attention(nn.Module):
    """Causal self-attention; queries, keys and values are interleaved by head, so that ranks can divide heads."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(shape.width, 3 * shape.width)
        self.c_proj = nn.Linear(shape.width, shape.width)
        self.attn_dropout = AttentionDropout(shape.attention_dropout)
        self.resid_dropout = Dropout(shape.residual_dropout, site=2)
        self.head_width = shape.width // shape.heads
        self.layer = layer

    def forward(self, x_NTE: Tensor, residual: Residual, context: Context) -> Tensor:
        """The residual stream plus attention."""
        q_NHTD, k_NHTD, v_NHTD = split_heads(x_NTE, self.c_attn, self.head_width, context)
        y_NTE = attention(q_NHTD, k_NHTD, v_NHTD, context, self.layer, dropout=self.attn_dropout)
        return add_linear(y_NTE, self.c_proj, residual, self.resid_dropout, context)


class MLP(nn.Module):
    """Two matrices and an activation between them, usually a GELU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.width, shape.inner)
        self.c_proj = nn.Linear(shape.inner, shape.width)
        self.dropout = Dropout(shape.residual_dropout, site=3)
        self.activation = shape.activation
        self.fp8 = False

    def forward(self, x_NTE: Tensor, residual: Residual, context: Context) -> Tensor:
        """The residual stream plus the MLP."""
        if self.fp8 and torch.is_grad_enabled():
            return add_fp8_mlp(x_NTE, self.c_fc, self.activation, self.c_proj, residual, self.dropout, context)
        y_NTF = linear_and_activation(x_NTE, self.c_fc, self.activation, context)
        return add_linear(y_NTF, self.c_proj, residual, self.dropout, context)


class Block(BaseBlock):
    """Attention and MLP after a LayerNorm each, both added to the residual stream."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width, shape.epsilon)
        self.attn = Attention(shape, layer)
        self.ln_2 = nn.LayerNorm(shape.width, shape.epsilon)
        self.mlp = MLP(shape)

    def compute(self, x_NTE: Tensor, context: Context) -> Tensor:
        """x + attention(norm(x)), then x + MLP(norm(x))."""
        last = self.attn.c_proj, self.mlp.c_proj
        y_NTE, residual = norm_and_residual(x_NTE, self.ln_1, last, self.mlp.dropout, context)
        x_NTE = self.attn(y_NTE, residual, context)
        y_NTE, residual = norm_and_residual(x_NTE, self.ln_2, last, self.mlp.dropout, context, biases=True)
        out: Tensor = self.mlp(y_NTE, residual, context)
        return out


class Net(BaseNet):
    """GPT-2, with learned positions and a tied or untied head."""

    shape: Shape
    blocks_name = "h"
    embedding_name = "wte"
    head_name = "lm_head"
    fp8_activations = GELUS

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.wte = new_embedding(shape.padded_vocab, shape.width)
        self.wpe = new_embedding(shape.positions, shape.width)
        self.drop = Dropout(shape.embedding_dropout, site=0)
        self.h = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width, shape.epsilon)
        self.lm_head = nn.Linear(shape.width, shape.padded_vocab, bias=False) if shape.untied else None

    def embed_inputs(self, ids_NT: Tensor, context: Context, documents_NT: Tensor | None) -> tuple[Tensor, Context]:
        """Token and position embeddings; positions start at 0 in every document."""
        positions = token_positions(ids_NT, context.cache, documents_NT)
        x_NTE = to_matmul_dtype(self.wte(ids_NT) + self.wpe(positions))
        context = self.block_context(ids_NT, context, documents_NT)
        return self.drop(x_NTE, context), context

    def final_norm(self, x_NTE: Tensor) -> Tensor:
        """The last LayerNorm."""
        return to_matmul_dtype(self.ln_f(x_NTE))
