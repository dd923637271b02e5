"""Llama's net in torch. Shapes in names: N samples, T tokens, E width, H heads, D head width, F inner width."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._python_dispatch import _disable_current_modes

from textmill.errors import TextmillError
from textmill.kernels.dropout_torch import drop
from textmill.kernels.fp8_torch import FP8_GATES, fp8_gated_mlp
from textmill.models.base_torch import ACTIVATIONS, BaseBlock, BaseNet, new_embedding, to_matmul_dtype
from textmill.models.cache_torch import Cache
from textmill.models.execution_torch import EAGER, Execution
from textmill.models.llama.facts import Shape
from textmill.models.llama.options import GATE_INPUTS, value_table
from textmill.models.llama.rotary import rotary_frequencies
from textmill.models.lora_torch import apply_linear, join_linears
from textmill.models.masks_torch import (
    Mask,
    causal_mask,
    document_block_mask,
    document_mask,
    token_positions,
    use_block_mask,
)


class Context(NamedTuple):
    """What all blocks share."""

    cos: Tensor
    """Cosine and sine of every position's angles."""
    sin: Tensor
    mask: Mask | None
    embedded_NTE: Tensor | None
    """The token embeddings, if blocks add them again."""
    values: tuple[Tensor, ...]
    """The rows of each table of value embeddings; inside a block, those of its own table."""


class RMSNorm(nn.Module):
    """Divides by the root mean square of the channels, in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.dtype == self.weight.dtype and not torch.is_grad_enabled():
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)  # one kernel instead of several
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * inverse * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; a head of keys may serve several heads of queries."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        queries = shape.heads * shape.head_width
        keys = shape.kv_heads * shape.head_width
        self.q_proj = nn.Linear(shape.width, queries, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(shape.width, keys, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(shape.width, keys, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(queries, shape.width, bias=shape.out_bias)
        self.q_norm = RMSNorm(shape.head_width, shape.epsilon) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_width, shape.epsilon) if shape.qk_norm else None
        self.value_gate: nn.Linear | None = None
        """Multiplies the value embeddings of each head, if the layer adds some."""
        if value_table(layer, shape.layers, shape.value_embeddings) is not None:
            self.value_gate = nn.Linear(min(GATE_INPUTS, shape.width), shape.kv_heads, bias=False)
        self.shape = shape
        self.layer = layer
        self.heads_part = 0
        """Which of several equal parts of the heads a tensor-parallel rank has."""

    def forward(self, x_NTE: Tensor, keys_N: Tensor | None, cache: Cache | None, context: Context) -> Tensor:
        parts = join_linears((self.q_proj, self.k_proj, self.v_proj), x_NTE, keys_N)
        q_NTHD, k_NTHD, v_NTHD = (part.view(*x_NTE.shape[:2], -1, self.shape.head_width) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q_NTHD = self.q_norm(q_NTHD)
            k_NTHD = self.k_norm(k_NTHD)
        if self.value_gate is not None:
            gate_NTH = 2 * torch.sigmoid(self.value_gate(x_NTE[..., : self.value_gate.in_features]))
            v_NTHD = v_NTHD + gate_NTH[..., None] * context.values[0].view_as(v_NTHD)
        q_NHTD, k_NHTD = (apply_rotary(part.transpose(1, 2), context.cos, context.sin) for part in (q_NTHD, k_NTHD))
        y_NHTD = self._attend(q_NHTD, k_NHTD, v_NTHD.transpose(1, 2), keys_N, cache, context.mask)
        return apply_linear(self.o_proj, y_NHTD.transpose(1, 2).flatten(2), keys_N)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, keys_N: Tensor | None, cache: Cache | None, mask: Mask | None
    ) -> Tensor:
        """Attention's weighted values."""
        grouped = self.shape.heads != self.shape.kv_heads
        if cache is not None:
            return cache.attend(self.layer, q, k, v)
        if isinstance(mask, BlockMask):
            return flex_attention(q, k, v, block_mask=mask, enable_gqa=grouped)
        if keys_N is not None and self.shape.attention_dropout:
            return self._attention_weights(q, k, keys_N, mask) @ self._repeat(v)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)

    def _repeat(self, x_NHTD: Tensor) -> Tensor:
        """Keys or values once for each head of queries."""
        return x_NHTD.repeat_interleave(self.shape.heads // self.shape.kv_heads, 1)

    def _attention_weights(self, q: Tensor, k: Tensor, keys_N: Tensor, mask_N1TT: Tensor | None) -> Tensor:
        """Explicit attention weights, for dropout on them."""
        scores = (q @ self._repeat(k).transpose(2, 3)) * q.shape[-1] ** -0.5
        mask = causal_mask(scores.shape[2], scores.device) if mask_N1TT is None else mask_N1TT
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32)
        return drop(weights, self.shape.attention_dropout, keys_N, 1, self.heads_part).to(q.dtype)


class MLP(nn.Module):
    """Two matrices side by side, the first one's outputs activated as a gate of the second's, then one back.

    Without a gate the second's outputs are activated.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.inner, bias=shape.mlp_bias) if shape.gated else None
        self.up_proj = nn.Linear(shape.width, shape.inner, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=shape.mlp_bias)
        self.activation = ACTIVATIONS[shape.activation]
        self.kind = shape.activation
        self.fp8 = False

    def forward(self, x_NTE: Tensor, keys_N: Tensor | None) -> Tensor:
        if self.gate_proj is None:
            inner_NTF = self.activation(apply_linear(self.up_proj, x_NTE, keys_N))
            return apply_linear(self.down_proj, inner_NTF, keys_N)
        if self.fp8 and torch.is_grad_enabled():
            weights = (self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
            return fp8_gated_mlp(x_NTE.flatten(0, -2), *weights, self.kind).view(x_NTE.shape)
        gate_NTF, up_NTF = join_linears((self.gate_proj, self.up_proj), x_NTE, keys_N)
        return apply_linear(self.down_proj, self.activation(gate_NTF) * up_NTF, keys_N)


def apply_rotary(x_NHTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of channels (i, i + D / 2) of a head by the angles of their positions."""
    first, second = x_NHTD.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x_NHTD.dtype)


def frequencies_of(shape: Shape) -> tuple[NDArray[np.float32], float]:
    """The rotary frequencies [D / 2] of a shape, and the factor of sine and cosine.

    Computed in fp32 on the CPU, as transformers does; in float64 angles of far positions would differ.
    """
    with _disable_current_modes(), torch.device("cpu"):  # a plan runs the net on tensors without values
        powers_D = shape.rotary_base ** (torch.arange(0, shape.head_width, 2, dtype=torch.float32) / shape.head_width)
        return rotary_frequencies(powers_D.numpy(), shape.rotary_base, shape.rotary_scaling)


class Block(BaseBlock):
    """Attention and MLP after an RMSNorm each, both added to the residual stream."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.stream_scale = nn.Parameter(torch.empty(1)) if shape.embedding_residual else None
        self.embedding_scale = nn.Parameter(torch.empty(1)) if shape.embedding_residual else None
        self.input_layernorm = RMSNorm(shape.width, shape.epsilon)
        self.self_attn = Attention(shape, layer)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.epsilon)
        self.mlp = MLP(shape)
        self.dropout = shape.dropout
        self.table = value_table(layer, shape.layers, shape.value_embeddings)
        """Which value embeddings attention adds to its values."""
        self.tokens_part = 0
        """Which of several equal parts of the tokens a sequence-parallel rank has."""

    def forward(
        self, x_NTE: Tensor, keys_N: Tensor | None, cache: Cache | None, context: Context, execution: Execution = EAGER
    ) -> Tensor:
        """As BaseBlock's. The table is chosen here, so that blocks with any of them share their compiled code."""
        values = () if self.table is None else (context.values[self.table],)
        return super().forward(x_NTE, keys_N, cache, context._replace(values=values), execution)

    def compute(self, x_NTE: Tensor, keys_N: Tensor | None, cache: Cache | None, context: Context) -> Tensor:
        """The residual stream after this block."""
        if context.embedded_NTE is not None:
            assert self.stream_scale is not None
            assert self.embedding_scale is not None
            x_NTE = (self.stream_scale * x_NTE + self.embedding_scale * context.embedded_NTE).to(x_NTE.dtype)
        y_NTE = self.self_attn(self.input_layernorm(x_NTE), keys_N, cache, context)
        x_NTE = x_NTE + drop(y_NTE, self.dropout, keys_N, 2, self.tokens_part)
        y_NTE = self.mlp(self.post_attention_layernorm(x_NTE), keys_N)
        return x_NTE + drop(y_NTE, self.dropout, keys_N, 3, self.tokens_part)


class Net(BaseNet):
    """Llama, Qwen2 or Qwen3, with a tied or untied head."""

    shape: Shape
    fp8_activations = FP8_GATES

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.embed_tokens = new_embedding(shape.padded_vocab, shape.width)
        values = shape.kv_heads * shape.head_width
        self.value_embeddings = nn.ModuleList(
            new_embedding(shape.padded_vocab, values) for _ in range(shape.value_embeddings)
        )
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = RMSNorm(shape.width, shape.epsilon)
        self.lm_head = nn.Linear(shape.width, shape.padded_vocab, bias=False) if shape.untied else None
        self.tokens_part = 0
        self.frequencies_D = torch.empty(0)
        """The rotary frequency of each pair of channels, on the device of the last input; see `forward`."""
        self.rotary_scale = 1.0

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks, first to last."""
        return self.layers

    @property
    def embedding(self) -> nn.Embedding:
        """The token embedding, with its padding rows."""
        return self.embed_tokens

    @property
    def head(self) -> Tensor:
        """The head's own weights, or those of the embedding that it is tied to."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def logit_softcap(self) -> float:
        """The cap of the logits."""
        return self.shape.logit_softcap

    @property
    def cache_shape(self) -> tuple[int, int]:
        """Heads of keys, and their width."""
        return self.shape.kv_heads, self.shape.head_width

    def forward(self, ids_NT: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """As BaseNet's; the frequencies are put on the device here, where nothing is compiled or captured."""
        if not len(self.frequencies_D) or self.frequencies_D.device != ids_NT.device:
            frequencies_D, self.rotary_scale = frequencies_of(self.shape)
            with torch.inference_mode(False):
                self.frequencies_D = torch.tensor(frequencies_D.tolist(), dtype=torch.float32, device=ids_NT.device)
        return super().forward(ids_NT, *arguments, **options)

    def use_fp8(self) -> None:
        """As BaseNet's; MLPs with biases or without a gate have no fp8 code."""
        for name, used in {"mlp_bias": self.shape.mlp_bias, "model.shape.gated=false": not self.shape.gated}.items():
            if used:
                raise TextmillError(f"engine.precision: fp8 does not support {name}; set engine.precision=auto")
        super().use_fp8()

    def begin(
        self, ids_NT: Tensor, keys_N: Tensor | None, positions_NT: Tensor | None, documents_NT: Tensor | None
    ) -> tuple[Tensor, Context]:
        """The residual stream before the first block; positions start at 0 in every document."""
        mask = None if documents_NT is None else self._mask(documents_NT, keys_N)
        positions = token_positions(ids_NT, positions_NT, documents_NT)
        angles = (positions[..., None].float() * self.frequencies_D).unsqueeze(-3)  # [N or none, 1, T, D / 2]
        x_NTE = drop(to_matmul_dtype(self.embed_tokens(ids_NT)), self.shape.dropout, keys_N, 0, self.tokens_part)
        values = tuple(to_matmul_dtype(table(ids_NT)) for table in self.value_embeddings)
        # A copy: if the first block had the same tensor twice, it would be compiled on its own.
        embedded_NTE = x_NTE.clone() if self.shape.embedding_residual else None
        return x_NTE, Context(
            angles.cos() * self.rotary_scale, angles.sin() * self.rotary_scale, mask, embedded_NTE, values
        )

    def end(self, x_NTE: Tensor) -> Tensor:
        """The last norm."""
        return to_matmul_dtype(self.norm(x_NTE))

    def _mask(self, documents_NT: Tensor, keys_N: Tensor | None) -> Mask:
        """The mask inside documents; attention dropout and activation checkpointing need the explicit mask."""
        explicit = self.recompute or (keys_N is not None and self.shape.attention_dropout)
        blocks = not explicit and use_block_mask(documents_NT, self.shape.head_width)
        return document_block_mask(documents_NT) if blocks else document_mask(documents_NT)
