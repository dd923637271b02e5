"""What torch nets are written with: `BaseNet` and `BaseBlock`, which all share, and the calls of layers, each of which
chooses its kernel itself.

A forward pass is `embed_inputs`, every block's `compute`, and `final_norm`. Each of the three may be compiled
(`CompiledParts`). All blocks are alike, so only one is compiled, and all share the compiled code: compile time does not
grow with depth. Each block's gradients are ready when its backward pass ends, so communication overlaps with the rest.

A net calls `linear(x, layer, context)` or `attention(q, k, v, context)`; adapters, the KV cache, masks, dropout and the
fused kernels of compiled training on a GPU are decided here. `Context` has what all layers of a forward pass share.

Shapes in names: N samples, T tokens, S tokens in the cache, E width, F outputs, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from textmill.config import LoraConfig
from textmill.errors import TextmillError
from textmill.kernels import matmul_torch as matmul
from textmill.kernels.dropout_torch import block_keys, drop
from textmill.kernels.fp8_torch import WIDTH_MULTIPLE, fp8_mlp
from textmill.kernels.gelu_torch import bias_gelu
from textmill.kernels.norms_torch import norm_with_residual_gradient
from textmill.kernels.triton_support import HAS_TRITON
from textmill.models.family import Shape
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


def _embed_inputs(net: Any, *arguments: Any) -> Any:
    return net.embed_inputs(*arguments)


def _compute(block: Any, *arguments: Any) -> Any:
    return block.compute(*arguments)


def _final_norm(net: Any, *arguments: Any) -> Any:
    return net.final_norm(*arguments)


@dataclass(frozen=True)
class CompiledParts:
    """The three parts of a forward pass as compiled functions of a net or block; hooks of FSDP stay outside of them."""

    embed_inputs: Callable[..., Any]
    compute: Callable[..., Any]
    final_norm: Callable[..., Any]


def compile_parts(**settings: Any) -> CompiledParts:
    """Each function compiled at its first call, with these settings of torch.compile."""
    return CompiledParts(
        *(torch.compile(part, dynamic=False, **settings) for part in (_embed_inputs, _compute, _final_norm))
    )


class BaseBlock(nn.Module):
    """A block of a net; a family writes `compute`."""

    auxiliary_loss: Tensor | None = None
    """What this pass adds to the loss: `compute` sets it in a net with `has_auxiliary_loss`, such as a mixture of
    experts that balances their load; a mean over the tokens of the pass."""

    def forward(self, x_NTE: Tensor, context: Context, compiled: CompiledParts | None = None) -> Tensor:
        """The residual stream after this block."""
        if compiled is None:
            return self.compute(x_NTE, context)
        out: Tensor = compiled.compute(self, x_NTE, context)
        return out

    def compute(self, x_NTE: Tensor, context: Context) -> Tensor:
        """What the block does."""
        raise NotImplementedError


class BaseNet(nn.Module):
    """Token ids in, hidden states out. A family writes `embed_inputs`, `final_norm` and the names of three modules.

    For tensor parallelism, a module with column-parallel matrices takes their common input as its first argument, and
    ends in the row-parallel matrix. Dropout has the `part` of a rank: of the heads in attention, and with sequence
    parallelism of the tokens elsewhere.

    A family trained on masked tokens sets `head_for_labels_only`, and may write `head_input`, `head_bias` and
    `pair_logits`; one with heads for finetuning, `label_logits`.
    """

    blocks_name = "blocks"
    """The attribute with the list of blocks."""
    embedding_name = "embedding"
    """The attribute with the token embedding."""
    head_name = ""
    """The attribute with the head, if the net has one of its own; it may be None. Else it is the embedding (tied)."""
    head_for_labels_only = False
    """True if few tokens of a sample have a label: the head is computed for those alone."""
    has_pair_head = False
    """True if `pair_logits` predicts a class for each packed sentence pair."""
    has_auxiliary_loss = False
    """True if blocks set `auxiliary_loss`."""
    has_label_head = False
    """True if `label_logits` replaces the head: the labels of a batch are not tokens of the vocabulary."""
    fp8_activations: tuple[str, ...] = ()
    """Activations that the family's MLPs can have in fp8; empty: it has no fp8 code."""
    causal = True
    """False if tokens attend in both directions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.activation_checkpointing = 0
        """Activation checkpointing: this many blocks at a time are recomputed in the backward pass; 0: none."""
        self.lora: LoraConfig | None = None
        """The settings of its LoRA adapters, if it has any."""
        self.fp8 = False
        """True if training computes some matmuls in fp8."""
        self.stage_blocks: list[range] | None = None
        """Pipeline parallelism: the blocks of each chunk that this process has; None: all."""
        self.absent: set[str] = set()
        """Pipeline parallelism: parameters that only other processes have; here they are on the meta device."""

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks, first to last: each is wrapped by FSDP, checkpointed and compiled on its own."""
        return cast(nn.ModuleList, self.get_submodule(self.blocks_name))

    @property
    def embedding(self) -> nn.Embedding:
        """The token embedding, with its padding rows."""
        return cast(nn.Embedding, self.get_submodule(self.embedding_name))

    @property
    def head(self) -> Tensor:
        """The matrix [padded vocabulary, width] that turns hidden states into logits."""
        own = getattr(self, self.head_name) if self.head_name else None
        weight: Tensor = self.embedding.weight if own is None else own.weight
        return weight

    @property
    def head_bias(self) -> Tensor | None:
        """The head's bias [padded vocabulary], if it has one."""
        return None

    def head_input(self, x_ME: Tensor) -> Tensor:
        """What the head multiplies: the hidden states, or what a family computes from them."""
        return x_ME

    def pair_logits(self, x_PE: Tensor) -> Tensor:
        """The logits [pairs, classes], from the hidden states of each pair's first token."""
        raise NotImplementedError

    def label_logits(
        self, x_NTE: Tensor, positions_NK: Tensor, documents_NT: Tensor | None, dropout_keys: Tensor | None
    ) -> Tensor:
        """The logits [N, labels, classes] of the first labels of each sample, from the hidden states.

        `positions_NK` are the labelled tokens, counted through all samples; `dropout_keys` turn dropout on.
        """
        raise NotImplementedError

    @property
    def cache_shape(self) -> tuple[int, int]:
        """Key heads and head width of the KV cache; grouped-query attention has fewer key heads than query heads."""
        return self.shape.heads, self.shape.width // self.shape.heads

    @property
    def own_blocks(self) -> list[nn.Module]:
        """The blocks that this process computes."""
        chunks = [range(len(self.blocks))] if self.stage_blocks is None else self.stage_blocks
        return [self.blocks[layer] for chunk in chunks for layer in chunk]

    def ends_with(self, blocks: range | None) -> bool:
        """Whether a pass over these blocks, or over all, ends with the last one, and with the norm after it."""
        return blocks is None or blocks.stop == len(self.blocks)

    def take_auxiliary_loss(self) -> Tensor:
        """The sum of what the blocks add to the loss of the last pass."""
        losses: list[Any] = [block.auxiliary_loss for block in self.blocks]
        for block in self.blocks:
            block.auxiliary_loss = None  # type: ignore[assignment]
        return torch.stack(losses).sum()

    def new_cache(self, slots: int, length: int, device: torch.device, dtype: torch.dtype) -> Cache | StateCache | None:
        """What generation keeps of `slots` texts of up to `length` tokens: here keys and values.

        A family may return a cache of its own, such as a `StateCache`, or None: then every new token takes a pass over
        its whole text."""
        return Cache(self.shape.layers, *self.cache_shape, slots, length, device, dtype)

    @property
    def has_attention_cache(self) -> bool:
        """Whether all that tokens know of each other comes from keys and values in the cache."""
        return type(self).new_cache is BaseNet.new_cache

    def embed_inputs(self, ids_NT: Tensor, context: Context, documents_NT: Tensor | None) -> tuple[Tensor, Context]:
        """The residual stream before the first block, and the context with what blocks need: mask, rotary angles.

        A family with segments takes `types_NT` too."""
        raise NotImplementedError

    def block_context(self, ids_NT: Tensor, context: Context, documents_NT: Tensor | None) -> Context:
        """The context with what blocks need. A family whose blocks need more than the mask writes its own, which
        `embed_inputs` calls too."""
        return Context(context.dropout_keys, context.cache, self.mask(documents_NT, context))

    def mask(self, documents_NT: Tensor | None, context: Context) -> Mask | None:
        """The mask inside documents; attention dropout and activation checkpointing need the explicit mask."""
        dropout = context.dropout_keys is not None and self.shape.attention_dropout
        explicit = bool(self.activation_checkpointing or dropout)
        return choose_mask(documents_NT, self.cache_shape[1], explicit=explicit, causal=self.causal)

    def final_norm(self, x_NTE: Tensor) -> Tensor:
        """The hidden states: what the net computes after the last block, usually a norm."""
        raise NotImplementedError

    def use_fp8(self) -> None:
        """Compute the MLPs' matmuls in fp8 in training: modules with an attribute `fp8`; the loss does so for the
        head."""
        shape: Any = self.shape
        if not self.fp8_activations:
            raise TextmillError(
                f"engine.precision: the family {shape.family} has no fp8 code; set engine.precision=auto"
            )
        if shape.width % WIDTH_MULTIPLE or shape.inner % WIDTH_MULTIPLE:
            raise TextmillError(
                f"engine.precision: fp8 needs widths that are multiples of {WIDTH_MULTIPLE}, found {shape.width} and "
                f"{shape.inner}; set engine.precision=auto"
            )
        if shape.activation not in self.fp8_activations:
            raise TextmillError(
                f"engine.precision: fp8 has no {shape.activation}, only {' and '.join(self.fp8_activations)}; "
                "set engine.precision=auto"
            )
        if self.lora is not None:
            raise TextmillError("engine.precision: fp8 does not support model.lora; set engine.precision=auto")
        parts: list[Any] = [module for module in self.modules() if hasattr(module, "fp8")]
        for part in parts:
            part.fp8 = True

    def forward(
        self,
        ids_NT: Tensor,
        dropout_keys: Tensor | None = None,
        cache: Cache | None = None,
        documents_NT: Tensor | None = None,
        compiled: CompiledParts | None = None,
        types_NT: Tensor | None = None,
        states_NTE: Tensor | None = None,
        blocks: range | None = None,
    ) -> Tensor:
        """Hidden states of every token, in the precision of the matmuls.

        `dropout_keys` turn dropout on; `cache` has the keys and values of earlier tokens; with `documents_NT`,
        attention stays inside documents; `types_NT` are segments, for families that have them. In a pipeline, only
        `blocks` run, on `states_NTE`, the residual stream before them; unless the last one is among them, the result is
        the residual stream after them.
        """
        types = () if types_NT is None else (types_NT,)
        inputs = ids_NT, Context(dropout_keys, cache), documents_NT, *types
        if states_NTE is not None:
            x_NTE = states_NTE
            context = self.block_context(*inputs[:3])
        else:
            x_NTE, context = compiled.embed_inputs(self, *inputs) if compiled else self.embed_inputs(*inputs)
        own = range(len(self.blocks)) if blocks is None else blocks
        if self.activation_checkpointing and cache is None and torch.is_grad_enabled():
            for start in range(own.start, own.stop, self.activation_checkpointing):
                # Dropout is a hash of positions, so that no random state needs to be kept and replayed.
                x_NTE = checkpoint(
                    self._run_blocks,
                    start,
                    min(start + self.activation_checkpointing, own.stop),
                    x_NTE,
                    context,
                    compiled,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
        else:
            x_NTE = self._run_blocks(own.start, own.stop, x_NTE, context, compiled)
        if not self.ends_with(blocks):
            return x_NTE
        out: Tensor = compiled.final_norm(self, x_NTE) if compiled else self.final_norm(x_NTE)
        return out

    def _run_blocks(
        self, start: int, stop: int, x_NTE: Tensor, context: Context, compiled: CompiledParts | None
    ) -> Tensor:
        for layer, block in enumerate(self.blocks[start:stop], start):
            x_NTE = block(x_NTE, context.of_block(layer), compiled)
        return x_NTE

    def logits(self, x_NTE: Tensor) -> Tensor:
        """Logits of the real vocabulary; padding rows never reach a softmax."""
        return F.linear(self.head_input(x_NTE), self.head, self.head_bias)[..., : self.shape.vocab]


# Dropout.


class Dropout(nn.Module):
    """Zeroes a fraction of the residual stream, if the context has dropout keys. Each use in a block has its site."""

    def __init__(self, fraction: float, site: int) -> None:
        super().__init__()
        self.fraction = fraction
        self.site = site
        self.part = 0
        """Which of several equal parts of the second dimension a tensor-parallel rank has."""

    def is_active(self, context: Context) -> bool:
        """True if it changes anything."""
        return context.dropout_keys is not None and self.fraction > 0

    def forward(self, x_NTE: Tensor, context: Context) -> Tensor:
        return drop(x_NTE, self.fraction, context.dropout_keys, self.site, self.part)


class AttentionDropout(Dropout):
    """Zeroes a fraction of attention's weights [N, H, T, T], which must be computed explicitly then; always the first
    site of a block."""

    def __init__(self, fraction: float) -> None:
        super().__init__(fraction, site=1)


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
