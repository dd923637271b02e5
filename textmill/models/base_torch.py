"""BaseNet and BaseBlock: what all torch nets share. Shapes in names: N samples, T tokens, E width, V vocabulary.

A forward pass is `embed_inputs`, every block's `compute`, and `final_norm`. Each of the three may be compiled
(`CompiledParts`). All blocks are alike, so only one is compiled, and all share the compiled code: compile time does not
grow with depth. Each block's gradients are ready when its backward pass ends, so communication overlaps with the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from textmill.config import LoraConfig
from textmill.errors import TextmillError
from textmill.kernels.fp8_torch import WIDTH_MULTIPLE
from textmill.models.family import Shape
from textmill.models.layers_torch import Cache, Context, Mask, StateCache, choose_mask


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
    ends in the row-parallel matrix. Modules with dropout have `tokens_part` (dropout of the residual stream) or
    `heads_part` (dropout of attention weights): which of several equal parts this rank has.

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
