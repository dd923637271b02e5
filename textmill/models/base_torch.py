"""BaseNet and BaseBlock: what all torch nets share. Shapes in names: N samples, T tokens, E width, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from textmill.config import LoraConfig
from textmill.errors import TextmillError
from textmill.kernels.dropout_torch import block_keys
from textmill.kernels.fp8_torch import WIDTH_MULTIPLE
from textmill.models.cache_torch import Cache
from textmill.models.execution_torch import EAGER, Execution
from textmill.models.family import Shape

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "tanh": torch.tanh,
}
"""Activations of MLPs by our names."""


class BaseBlock(nn.Module):
    """A block of a net; a family writes `compute`."""

    def forward(
        self, x_NTE: Tensor, keys_N: Tensor | None, cache: Cache | None, context: Any, execution: Execution = EAGER
    ) -> Tensor:
        """The residual stream after this block; `keys_N` are the block's own dropout keys."""
        out: Tensor = execution.compute(self, x_NTE, keys_N, cache, context)
        return out

    def compute(self, x_NTE: Tensor, keys_N: Tensor | None, cache: Cache | None, context: Any) -> Tensor:
        """What the block does; `context` is what the net's `begin` returned: masks, rotary angles."""
        raise NotImplementedError


class BaseNet(nn.Module):
    """Token ids in, hidden states out. A family writes `begin`, `end`, `blocks`, `embedding` and `head`.

    For tensor parallelism, a module with column-parallel matrices takes their common input as its first argument, and
    ends in the row-parallel matrix. Modules with dropout have `tokens_part` (dropout of the residual stream) or
    `heads_part` (dropout of attention weights): which of several equal parts this rank has.

    A family trained on masked tokens sets `few_labels`, and may write `head_input`, `head_bias` and `pair_logits`; one
    with heads for finetuning, `label_logits`.
    """

    few_labels = False
    """True if few tokens of a sample have a label: the head is computed for those alone."""
    has_pair_head = False
    """True if `pair_logits` predicts a class for each packed sentence pair."""
    has_label_head = False
    """True if `label_logits` replaces the head: the labels of a batch are not tokens of the vocabulary."""
    fp8_activations: tuple[str, ...] = ()
    """Activations that the family's MLPs can have in fp8; empty: it has no fp8 code."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.recompute = 0
        """Activation checkpointing: this many blocks at a time are recomputed in the backward pass; 0: none."""
        self.lora: LoraConfig | None = None
        """The settings of its LoRA adapters, if it has any."""
        self.fp8 = False
        """True if training computes some matmuls in fp8."""

    @property
    def blocks(self) -> nn.ModuleList:
        """The blocks, first to last: each is wrapped by FSDP, checkpointed and compiled on its own."""
        raise NotImplementedError

    @property
    def embedding(self) -> nn.Embedding:
        """The token embedding."""
        raise NotImplementedError

    @property
    def head(self) -> Tensor:
        """The matrix [padded vocabulary, width] that turns hidden states into logits."""
        raise NotImplementedError

    @property
    def head_bias(self) -> Tensor | None:
        """The head's bias [padded vocabulary], if it has one."""
        return None

    @property
    def logit_softcap(self) -> float:
        """Logits x become cap * tanh(x / cap); 0: they stay."""
        return 0.0

    def head_input(self, x_ME: Tensor) -> Tensor:
        """What the head multiplies: the hidden states, or what a family computes from them."""
        return x_ME

    def pair_logits(self, x_PE: Tensor) -> Tensor:
        """The logits [pairs, classes], from the hidden states of each pair's first token."""
        raise NotImplementedError

    def label_logits(
        self, x_NTE: Tensor, positions_NK: Tensor, documents_NT: Tensor | None, keys_N: Tensor | None
    ) -> Tensor:
        """The logits [N, labels, classes] of the first labels of each sample, from the hidden states.

        `positions_NK` are the labelled tokens, counted through all samples; `keys_N` turns dropout on.
        """
        raise NotImplementedError

    @property
    def cache_shape(self) -> tuple[int, int]:
        """Key heads and head width of the KV cache; grouped-query attention has fewer key heads than query heads."""
        return self.shape.heads, self.shape.width // self.shape.heads

    def begin(
        self, ids_NT: Tensor, keys_N: Tensor | None, positions_NT: Tensor | None, documents_NT: Tensor | None
    ) -> tuple[Tensor, Any]:
        """The residual stream before the first block, and the context for all blocks; default positions: 0, 1, 2 ..."""
        raise NotImplementedError

    def end(self, x_NTE: Tensor) -> Tensor:
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
        keys_N: Tensor | None = None,
        cache: Cache | None = None,
        documents_NT: Tensor | None = None,
        execution: Execution = EAGER,
        types_NT: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of every token, in the precision of the matmuls.

        `keys_N` turns dropout on; `cache` has the keys and values of earlier tokens; with `documents_NT`, attention
        stays inside documents; `types_NT` are segments, for families whose `begin` takes them.
        """
        positions = None if cache is None else cache.positions_NT
        types = () if types_NT is None else (types_NT,)
        x_NTE, context = execution.begin(self, ids_NT, keys_N, positions, documents_NT, *types)
        count = len(self.blocks)
        if self.recompute and cache is None and torch.is_grad_enabled():
            for start in range(0, count, self.recompute):
                # Dropout is a hash of positions, so that no random state needs to be kept and replayed.
                x_NTE = checkpoint(
                    self._run_blocks,
                    start,
                    start + self.recompute,
                    x_NTE,
                    keys_N,
                    cache,
                    context,
                    execution,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
        else:
            x_NTE = self._run_blocks(0, count, x_NTE, keys_N, cache, context, execution)
        out: Tensor = execution.end(self, x_NTE)
        return out

    def _run_blocks(
        self,
        start: int,
        stop: int,
        x_NTE: Tensor,
        keys_N: Tensor | None,
        cache: Cache | None,
        context: Any,
        execution: Execution,
    ) -> Tensor:
        for layer, block in enumerate(self.blocks[start:stop], start):
            x_NTE = block(x_NTE, block_keys(keys_N, layer), cache, context, execution)
        return x_NTE

    def logits(self, x_NTE: Tensor) -> Tensor:
        """Logits of the real vocabulary; padding rows never reach a softmax."""
        logits = F.linear(self.head_input(x_NTE), self.head, self.head_bias)[..., : self.shape.vocab]
        return cap_logits(logits, self.logit_softcap)


def cap_logits(logits: Tensor, cap: float) -> Tensor:
    """Logits limited smoothly to plus and minus `cap`, in fp32 at least; 0: they stay."""
    if not cap:
        return logits
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    return cap * torch.tanh(wide / cap)


def new_embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding without initial values: sampling them on the meta device would make torch import its compiler."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


def to_matmul_dtype(x: Tensor) -> Tensor:
    """The residual stream in the precision of the matmuls: half the memory traffic."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
