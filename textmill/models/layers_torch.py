"""The calls that torch nets are written with: linear layers, attention, MLPs, dropout. Each chooses its kernel itself.

A net calls `linear(x, layer, context)` or `attention(q, k, v, context)`; adapters, the KV cache, masks, dropout and the
fused kernels of compiled training on a GPU are decided here. `Context` has what all layers of a forward pass share.

Shapes in names: N samples, T tokens, S tokens in the cache, E width, F outputs, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from textmill.config import LoraConfig
from textmill.kernels import matmul_torch as matmul
from textmill.kernels.dropout_torch import block_keys, drop
from textmill.kernels.fp8_torch import fp8_mlp
from textmill.kernels.gelu_torch import bias_gelu
from textmill.kernels.norms_torch import norm_with_residual_gradient
from textmill.kernels.triton_support import HAS_TRITON
from textmill.models.hf_config import GELUS

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "tanh": torch.tanh,
}
"""Activations of MLPs by our names."""
Mask = Tensor | BlockMask
"""Which tokens each token attends to: [N, 1, T, T], or a block mask of that."""
BLOCK = 128
"""Positions per block of a block mask."""


class Context(NamedTuple):
    """What all layers of a forward pass share. It is part of what is compiled, so it has tensors only."""

    dropout_keys: Tensor | None = None
    """A key for each sample, from which dropout is computed; None: no dropout. Each block has its own."""
    cache: Any = None
    """What is kept of earlier tokens: a `Cache` with their keys and values, or the cache of the family's own."""
    mask: Mask | None = None
    """Which tokens each one attends to; None: all, or in a causal net all before it."""
    extra: Any = None
    """What a family adds, such as rotary angles."""

    def of_block(self, layer: int) -> Context:
        """The same with dropout keys for one block."""
        return self._replace(dropout_keys=block_keys(self.dropout_keys, layer))


class Dropout(nn.Module):
    """Zeroes a fraction of the residual stream, if the context has dropout keys. Each use in a block has its site."""

    def __init__(self, fraction: float, site: int) -> None:
        super().__init__()
        self.fraction = fraction
        self.site = site
        self.tokens_part = 0
        """Which of several equal parts of the tokens a sequence-parallel rank has."""

    def is_active(self, context: Context) -> bool:
        """True if it changes anything."""
        return context.dropout_keys is not None and self.fraction > 0

    def forward(self, x_NTE: Tensor, context: Context) -> Tensor:
        return drop(x_NTE, self.fraction, context.dropout_keys, self.site, self.tokens_part)


class AttentionDropout(nn.Module):
    """Zeroes a fraction of attention's weights; always the first site of a block."""

    def __init__(self, fraction: float) -> None:
        super().__init__()
        self.fraction = fraction
        self.heads_part = 0
        """Which of several equal parts of the heads a tensor-parallel rank has."""

    def is_active(self, context: Context) -> bool:
        """True if it changes anything: then the weights must be computed explicitly."""
        return context.dropout_keys is not None and self.fraction > 0

    def forward(self, weights_NHTT: Tensor, context: Context) -> Tensor:
        return drop(weights_NHTT, self.fraction, context.dropout_keys, 1, self.heads_part)


# Linear layers.


class AdaptedLinear(nn.Linear):
    """A linear layer with a LoRA adapter: x W + scale dropout(x) A B. W is frozen, A and B are trained."""

    def __init__(self, layer: nn.Linear, lora: LoraConfig, site: int) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.lora_A = nn.Linear(layer.in_features, lora.rank, bias=False)
        self.lora_B = nn.Linear(lora.rank, layer.out_features, bias=False)
        self.lora = lora
        self.site = site

    def forward(self, x_NTE: Tensor, dropout_keys: Tensor | None = None) -> Tensor:
        return super().forward(x_NTE) + self.adapter_output(x_NTE, dropout_keys)

    def adapter_output(self, x_NTE: Tensor, dropout_keys: Tensor | None, columns: tuple[int, int] = (0, 1)) -> Tensor:
        """What the adapter adds. If x has only some of the columns, `columns` is (number, count) of equal parts."""
        seen_NTE = drop(x_NTE, self.lora.dropout, dropout_keys, self.site, columns=columns)
        out: Tensor = self.lora_B(self.lora_A(seen_NTE)) * (self.lora.alpha / self.lora.rank)
        return out


def linear(x_NTE: Tensor, layer: nn.Module, context: Context) -> Tensor:
    """A linear layer, with its adapter if it has one."""
    if type(layer) is nn.Linear and matmul.use_tuned_matmul(x_NTE, layer.weight):
        return matmul.linear(x_NTE, layer.weight, layer.bias)
    out: Tensor = layer(x_NTE, context.dropout_keys) if isinstance(layer, AdaptedLinear) else layer(x_NTE)
    return out


def linears(x_NTE: Tensor, layers: tuple[nn.Linear, ...], context: Context) -> tuple[Tensor, ...]:
    """The outputs of layers with one input; in compiled training on a GPU they are one matmul.

    Joining the matrices costs nothing there: it is part of their cast to the matmuls' precision.
    """
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    plain = all(type(layer) is nn.Linear for layer in layers) and len(biases) in (0, len(layers))
    if not plain or not matmul.use_tuned_matmul(x_NTE, layers[0].weight):
        return tuple(linear(x_NTE, layer, context) for layer in layers)
    bias_F = torch.cat(biases) if biases else None
    joined = matmul.linear(x_NTE, torch.cat([layer.weight for layer in layers]), bias_F)
    return torch.split(joined, [len(layer.weight) for layer in layers], -1)


def linear_and_activation(x_NTE: Tensor, layer: nn.Module, activation: str, context: Context) -> Tensor:
    """A linear layer and its activation; in training on a GPU, one kernel adds the bias and computes GELU."""
    if activation in GELUS and HAS_TRITON and x_NTE.is_cuda and torch.is_grad_enabled() and type(layer) is nn.Linear:
        x_NTF = matmul.linear(x_NTE, layer.weight, None)
        y_MF: Tensor = bias_gelu(x_NTF.flatten(0, -2), layer.bias, activation == "gelu_new")
        return y_MF.view(x_NTF.shape)
    return ACTIVATIONS[activation](linear(x_NTE, layer, context))


# The residual stream. In compiled training on a GPU the last matmul of a branch adds the stream itself. The backward
# pass of the norm before a branch then sums the gradients of the stream and of the biases that were added to it.


class Residual(NamedTuple):
    """The residual stream that a branch is added to."""

    stream_NTE: Tensor
    in_matmul: bool = False
    """True if the branch's last matmul adds it."""


def norm_and_residual(
    x_NTE: Tensor,
    norm: nn.LayerNorm,
    layers: tuple[nn.Linear, nn.Linear],
    dropout: Dropout,
    context: Context,
    *,
    biases: bool = False,
) -> tuple[Tensor, Residual]:
    """The LayerNorm of the residual stream, and the stream, to which the branch after it is added.

    `layers` are the last ones of a block's two branches; `biases`: this norm is between them.
    """
    plain = all(type(layer) is nn.Linear for layer in layers)
    if dropout.is_active(context) or not plain or not matmul.use_tuned_matmul(x_NTE, layers[0].weight):
        return norm(x_NTE), Residual(x_NTE)
    both = [layer.bias for layer in layers] if biases else [None, None]
    y_NTE, x_NTE = norm_with_residual_gradient(x_NTE, norm, *both)
    return y_NTE, Residual(x_NTE, in_matmul=True)


def add_linear(y_NTF: Tensor, layer: nn.Linear, residual: Residual, dropout: Dropout, context: Context) -> Tensor:
    """The residual stream plus the last linear layer of a branch."""
    if residual.in_matmul:
        return matmul.add_linear(residual.stream_NTE, layer, y_NTF)
    added_NTE: Tensor = dropout(linear(y_NTF, layer, context), context)
    return residual.stream_NTE + added_NTE


def add_fp8_mlp(
    x_NTE: Tensor,
    first: nn.Linear,
    activation: str,
    last: nn.Linear,
    residual: Residual,
    dropout: Dropout,
    context: Context,
) -> Tensor:
    """The residual stream plus an MLP in fp8: two linear layers and a GELU between them."""
    tanh = activation == "gelu_new"
    y_NTE = fp8_mlp(x_NTE.flatten(0, -2), first.weight, first.bias, last.weight, tanh).view(x_NTE.shape)
    bias_E = last.bias.to(y_NTE.dtype)
    if residual.in_matmul:
        return residual.stream_NTE + (y_NTE + bias_E.detach())  # the norm computes the gradient of the bias
    added_NTE: Tensor = dropout(y_NTE + bias_E, context)
    return residual.stream_NTE + added_NTE


# Attention.


def split_heads(x_NTE: Tensor, layer: nn.Linear, head_width: int, context: Context) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [N, H, T, D] of one linear layer, whose outputs are grouped by head."""
    q, k, v = linear(x_NTE, layer, context).view(*x_NTE.shape[:2], -1, 3, head_width).unbind(3)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def attention(
    q_NHTD: Tensor,
    k_NHTD: Tensor,
    v_NHTD: Tensor,
    context: Context,
    number: int = 0,
    *,
    dropout: AttentionDropout | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention's weighted values, heads joined [N, T, H x D]; `number` is that of the block, for the cache.

    There may be fewer key heads than query heads (grouped-query attention)."""
    cache, mask = context.cache, context.mask
    grouped = q_NHTD.shape[1] != k_NHTD.shape[1]
    if cache is not None:
        y_NHTD: Tensor = cache.attend(number, q_NHTD, k_NHTD, v_NHTD)
    elif isinstance(mask, BlockMask):
        y_NHTD = flex_attention(q_NHTD, k_NHTD, v_NHTD, block_mask=mask, enable_gqa=grouped)
    elif dropout is not None and dropout.is_active(context):
        y_NHTD = _attention_with_dropout(q_NHTD, k_NHTD, v_NHTD, mask, dropout, context, causal)
    else:
        causal = causal and mask is None
        y_NHTD = F.scaled_dot_product_attention(
            q_NHTD, k_NHTD, v_NHTD, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )
    return y_NHTD.transpose(1, 2).flatten(2)


def _attention_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: AttentionDropout, context: Context, causal: bool
) -> Tensor:
    """Attention with explicit weights; dropout is drawn for every head of queries."""
    if q.shape[1] != k.shape[1]:
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    if mask is None and causal:
        mask = causal_mask(scores.shape[2], scores.device)
    scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
    weights: Tensor = dropout(scores.softmax(-1, dtype=torch.float32), context)
    return weights.to(q.dtype) @ v


class Cache:
    """The keys and values of running texts, a slot of memory for each text, allocated once (KV cache).

    Call `read` or `extend` before a forward pass to choose what it adds."""

    def __init__(
        self,
        layers: int,
        heads: int,
        head_width: int,
        slots: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        # A token's key and value are neighbours, as most nets compute them. The extra slot is for padding rows.
        self.memory = torch.zeros(layers, slots + 1, length, heads, 2, head_width, device=device, dtype=dtype)
        self.rows: Tensor = torch.zeros(0, dtype=torch.long, device=device)
        self.positions_NT: Tensor | None = None
        """Positions of the new tokens; None: the pass reads contexts from their first token (prefill)."""
        self.mask_N1TS: Tensor | None = None
        self.slots = slice(0)
        """With `positions_NT`: the slots that the pass extends."""
        self.longest = 0

    def read(self, slots_N: Tensor) -> None:
        """The next pass reads contexts from their first token into these slots."""
        self.rows = slots_N
        self.positions_NT = None
        self.mask_N1TS = None

    def extend(self, positions_NT: Tensor, longest: int, first: int = 0) -> None:
        """The next pass adds tokens at these positions to the slots from `first` on.

        `longest` is their longest text then.
        """
        device = positions_NT.device
        self.slots = slice(first, first + len(positions_NT))
        self.rows = torch.arange(self.slots.start, self.slots.stop, device=device)[:, None]
        self.positions_NT = positions_NT
        self.longest = longest
        self.mask_N1TS = (torch.arange(longest, device=device) <= positions_NT[..., None])[:, None]

    def attend(self, layer: int, q_NHTD: Tensor, k_NHTD: Tensor, v_NHTD: Tensor) -> Tensor:
        """Store a layer's new keys and values; return causal attention of the queries over their entire texts."""
        keys, values = self.memory[layer].unbind(3)
        grouped = q_NHTD.shape[1] != k_NHTD.shape[1]
        if self.positions_NT is None:
            tokens = q_NHTD.shape[2]
            keys[self.rows, :tokens], values[self.rows, :tokens] = k_NHTD.transpose(1, 2), v_NHTD.transpose(1, 2)
            return F.scaled_dot_product_attention(q_NHTD, k_NHTD, v_NHTD, is_causal=True, enable_gqa=grouped)
        keys[self.rows, self.positions_NT] = k_NHTD.transpose(1, 2)
        values[self.rows, self.positions_NT] = v_NHTD.transpose(1, 2)
        k_NHSD, v_NHSD = (one[self.slots, : self.longest].transpose(1, 2) for one in (keys, values))
        return F.scaled_dot_product_attention(q_NHTD, k_NHSD, v_NHSD, attn_mask=self.mask_N1TS, enable_gqa=grouped)

    def move(self, source: int, target: int, used: int) -> None:
        """Copy the first `used` tokens of one slot into another."""
        self.memory[:, target, :used] = self.memory[:, source, :used]

    def reorder(self, sources: Tensor, used: int) -> None:
        """Fill the first slots with the first `used` tokens of the slots `sources`, for beam search."""
        self.memory[:, : len(sources), :used] = self.memory[:, sources, :used]


class StateCache:
    """The states of running texts in a recurrent net: one tensor of a fixed shape for each layer and slot.

    A block calls `state`, then `store` with the state after its tokens. A pass has no padding, except of samples that
    end together."""

    def __init__(
        self, layers: int, shape: tuple[int, ...], slots: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        self.memory = torch.zeros(layers, slots + 1, *shape, device=device, dtype=dtype)
        self.rows: Tensor = torch.zeros(0, dtype=torch.long, device=device)
        self.positions_NT: Tensor | None = None
        """Positions of the new tokens; None: the pass reads contexts from their first token (prefill)."""

    def read(self, slots_N: Tensor) -> None:
        """The next pass reads contexts from their first token into these slots."""
        self.rows = slots_N
        self.positions_NT = None

    def extend(self, positions_NT: Tensor, longest: int) -> None:
        """The next pass adds a token at these positions to the first slots."""
        self.rows = torch.arange(len(positions_NT), device=positions_NT.device)
        self.positions_NT = positions_NT

    def state(self, layer: int) -> Tensor:
        """The state [N, ...] of each text before the pass; zeros where it begins."""
        states = self.memory[layer, self.rows]
        if self.positions_NT is None:
            return torch.zeros_like(states)
        begins_N = (self.positions_NT[:, 0] == 0).view(-1, *[1] * (states.dim() - 1))
        return states.masked_fill(begins_N, 0)

    def store(self, layer: int, states: Tensor) -> None:
        """The state of each text after the pass."""
        self.memory[layer, self.rows] = states.to(self.memory.dtype)

    def move(self, source: int, target: int, used: int) -> None:
        """Copy one slot into another."""
        self.memory[:, target] = self.memory[:, source]

    def reorder(self, sources: Tensor, used: int) -> None:
        """Fill the first slots with the slots `sources`, for beam search."""
        self.memory[:, : len(sources)] = self.memory[:, sources]


# Masks and positions of packed samples, where attention stays inside documents.


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Each token attends to itself and to those before it: [T, T]."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril(0)


def document_mask(documents_NT: Tensor, *, causal: bool = True) -> Tensor:
    """Which tokens of its document each one attends to: those before it and itself, or all; [N, 1, T, T]."""
    same_NTT = documents_NT[:, :, None] == documents_NT[:, None, :]
    if causal:
        same_NTT = same_NTT & causal_mask(same_NTT.shape[1], same_NTT.device)
    return same_NTT[:, None]


def document_block_mask(documents_NT: Tensor, *, causal: bool = True) -> BlockMask:
    """`document_mask` as a block mask: attention skips blocks that are fully masked."""
    N, T = documents_NT.shape

    def attends(n: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = documents_NT[n, query] == documents_NT[n, key]
        return (query >= key) & same if causal else same

    return create_block_mask(attends, N, None, T, T, device=documents_NT.device)


def use_block_mask(documents_NT: Tensor, head_width: int) -> bool:
    """True if a block mask is faster: in a net compiled for a GPU, with shapes that fill the blocks."""
    fills = documents_NT.shape[1] % BLOCK == 0 and head_width in (16, 32, 64, 128, 256)
    return documents_NT.is_cuda and torch.compiler.is_compiling() and fills


def choose_mask(documents_NT: Tensor | None, head_width: int, *, explicit: bool, causal: bool = True) -> Mask | None:
    """The mask inside documents; `explicit`: it cannot be a block mask. None without documents."""
    if documents_NT is None:
        return None
    if not explicit and use_block_mask(documents_NT, head_width):
        return document_block_mask(documents_NT, causal=causal)
    return document_mask(documents_NT, causal=causal)


def token_positions(ids_NT: Tensor, cache: Cache | None, documents_NT: Tensor | None) -> Tensor:
    """The position of each token, [T] or [N, T]: those of the cache, else 0, 1, 2 ...; from 0 in every document."""
    positions = None if cache is None else cache.positions_NT
    if positions is None:
        positions = torch.arange(0, ids_NT.shape[1], device=ids_NT.device)
    return positions if documents_NT is None else positions - document_starts(documents_NT)


def document_starts(documents_NT: Tensor) -> Tensor:
    """The position at which each token's document starts."""
    positions_T = torch.arange(documents_NT.shape[1], device=documents_NT.device)
    new_NT = F.pad(documents_NT[:, 1:] != documents_NT[:, :-1], (1, 0), value=False)
    return torch.where(new_NT, positions_T, 0).cummax(1).values


# Embeddings and precision.


def new_embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding without initial values: sampling them on the meta device would make torch import its compiler."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


def to_matmul_dtype(x: Tensor) -> Tensor:
    """The residual stream in the precision of the matmuls: half the memory traffic."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
