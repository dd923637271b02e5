"""Llama's net in torch. Shapes in names: N samples, T tokens, E width, H heads, D head width, F inner width."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from textmill.errors import TextmillError
from textmill.kernels.fp8_torch import FP8_GATES, fp8_gated_mlp
from textmill.models.base_torch import (
    ACTIVATIONS,
    AttentionDropout,
    BaseBlock,
    BaseNet,
    Context,
    Dropout,
    attention,
    linear,
    new_embedding,
    to_matmul_dtype,
    token_positions,
)
from textmill.models.llama.family import Shape
from textmill.models.llama.rotary import rotary_frequencies


class Extra(NamedTuple):
    """What Llama's blocks share besides mask and cache."""

    cos: Tensor
    """Cosine and sine of every position's angles."""
    sin: Tensor


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
        self.dropout = AttentionDropout(shape.attention_dropout)
        self.head_width = shape.head_width
        self.layer = layer

    def forward(self, x_NTE: Tensor, context: Context) -> Tensor:
        extra: Extra = context.extra
        parts = (linear(x_NTE, layer, context) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q_NTHD, k_NTHD, v_NTHD = (part.view(*x_NTE.shape[:2], -1, self.head_width) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q_NTHD = self.q_norm(q_NTHD)
            k_NTHD = self.k_norm(k_NTHD)
        q_NHTD, k_NHTD = (apply_rotary(part.transpose(1, 2), extra.cos, extra.sin) for part in (q_NTHD, k_NTHD))
        y_NTE = attention(q_NHTD, k_NHTD, v_NTHD.transpose(1, 2), context, self.layer, dropout=self.dropout)
        return linear(y_NTE, self.o_proj, context)


class MLP(nn.Module):
    """Two matrices side by side, the first one's outputs activated as a gate of the second's, then one back."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.inner, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.width, shape.inner, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=shape.mlp_bias)
        self.activation = shape.activation
        self.fp8 = False

    def forward(self, x_NTE: Tensor, context: Context) -> Tensor:
        if self.fp8 and torch.is_grad_enabled():
            weights = (self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
            return fp8_gated_mlp(x_NTE.flatten(0, -2), *weights, self.activation).view(x_NTE.shape)
        gate_NTF = ACTIVATIONS[self.activation](linear(x_NTE, self.gate_proj, context))
        inner_NTF = gate_NTF * linear(x_NTE, self.up_proj, context)
        return linear(inner_NTF, self.down_proj, context)


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
        self.input_layernorm = RMSNorm(shape.width, shape.epsilon)
        self.self_attn = Attention(shape, layer)
        self.attn_dropout = Dropout(shape.dropout, site=2)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.epsilon)
        self.mlp = MLP(shape)
        self.mlp_dropout = Dropout(shape.dropout, site=3)

    def compute(self, x_NTE: Tensor, context: Context) -> Tensor:
        """x + attention(norm(x)), then x + MLP(norm(x))."""
        x_NTE = x_NTE + self.attn_dropout(self.self_attn(self.input_layernorm(x_NTE), context), context)
        out: Tensor = x_NTE + self.mlp_dropout(self.mlp(self.post_attention_layernorm(x_NTE), context), context)
        return out


class Net(BaseNet):
    """Llama, Qwen2 or Qwen3, with a tied or untied head."""

    shape: Shape
    blocks_name = "layers"
    embedding_name = "embed_tokens"
    head_name = "lm_head"
    fp8_activations = FP8_GATES

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.embed_tokens = new_embedding(shape.padded_vocab, shape.width)
        self.dropout = Dropout(shape.dropout, site=0)
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = RMSNorm(shape.width, shape.epsilon)
        self.lm_head = nn.Linear(shape.width, shape.padded_vocab, bias=False) if shape.untied else None
        self.frequencies_D = torch.empty(0)
        """The rotary frequency of each pair of channels, on the device of the last input; see `forward`."""
        self.rotary_scale = 1.0

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
        """As BaseNet's; MLPs with biases have no fp8 code."""
        if self.shape.mlp_bias:
            raise TextmillError("engine.precision: fp8 does not support mlp_bias; set engine.precision=auto")
        super().use_fp8()

    def embed_inputs(self, ids_NT: Tensor, context: Context, documents_NT: Tensor | None) -> tuple[Tensor, Context]:
        """Token embeddings, and what the blocks need."""
        x_NTE = self.dropout(to_matmul_dtype(self.embed_tokens(ids_NT)), context)
        return x_NTE, self.block_context(ids_NT, context, documents_NT)

    def block_context(self, ids_NT: Tensor, context: Context, documents_NT: Tensor | None) -> Context:
        """The mask and the rotary angles; positions start at 0 in every document."""
        positions = token_positions(ids_NT, context.cache, documents_NT)
        angles = (positions[..., None].float() * self.frequencies_D).unsqueeze(-3)  # [N or none, 1, T, D / 2]
        extra = Extra(angles.cos() * self.rotary_scale, angles.sin() * self.rotary_scale)
        return Context(context.dropout_keys, context.cache, self.mask(documents_NT, context), extra)

    def final_norm(self, x_NTE: Tensor) -> Tensor:
        """The last RMSNorm."""
        return to_matmul_dtype(self.norm(x_NTE))
