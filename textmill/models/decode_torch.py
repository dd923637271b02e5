"""Decoding many texts at once with any causal net: a slot of the KV cache for each text (continuous batching).

Shapes in names: N texts, T tokens, E width, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from textmill.kernels.transfer_torch import copy_to_device
from textmill.models import find_family_module
from textmill.models.base_torch import BaseNet
from textmill.models.layers_torch import Cache

PREFILL_TOKENS = 4096
"""Most prompt tokens, including padding, that one prefill reads, unless a single prompt has more."""


class Slots(Protocol):
    """The KV cache of running texts, which occupy the first slots, each with its own length."""

    net: BaseNet
    slots: int
    length: int
    device: torch.device

    def warm_up(self) -> int:
        """Do in advance what would delay the first texts: capture CUDA graphs; return how many were captured."""
        ...

    def fits_one_prefill(self, count: int, longest: int) -> bool:
        """True if `count` prompts, the longest with `longest` tokens, can be read in one prefill."""
        ...

    def prefill(self, first: int, contexts: list[list[int]]) -> Tensor:
        """Read contexts into consecutive slots, starting at `first`; return hidden states, padded on the right."""
        ...

    def decode(self, ids_N: Tensor, positions: list[int]) -> Tensor:
        """Add one token to each of the first slots, at its own position; return the logits of the next token.

        An id below 0 counts as 0."""
        ...

    def move(self, source: int, target: int, used: int) -> None:
        """Copy the first `used` tokens of one slot into another."""
        ...

    def reorder(self, sources: list[int], used: int) -> None:
        """Fill the first slots with the first `used` tokens of the slots `sources`, for beam search."""
        ...


class NetSlots:
    """Slots for any causal net, through `net(ids, cache=...)`."""

    def __init__(self, net: BaseNet, slots: int, length: int) -> None:
        weight = net.head
        self.net = net
        self.slots = slots
        self.length = length
        self.device = weight.device
        self.cache = Cache(net.shape.layers, *net.cache_shape, slots, length, weight.device, weight.dtype)

    def warm_up(self) -> int:
        """Nothing to do."""
        return 0

    def fits_one_prefill(self, count: int, longest: int) -> bool:
        """A limit on the tokens of one prefill."""
        return count * longest <= PREFILL_TOKENS

    @torch.inference_mode()
    def prefill(self, first: int, contexts: list[list[int]]) -> Tensor:
        """One forward pass. No token attends to the padding of shorter contexts, which is overwritten later."""
        longest = max(map(len, contexts))
        ids_NT = torch.tensor([context + [0] * (longest - len(context)) for context in contexts])
        slots_N = torch.arange(first, first + len(contexts))
        return self._read(ids_NT.to(self.device), slots_N.to(self.device))

    def _read(self, ids_NT: Tensor, slots_N: Tensor) -> Tensor:
        self.cache.read(slots_N)
        hidden_NTE: Tensor = self.net(ids_NT, cache=self.cache)
        return hidden_NTE

    @torch.inference_mode()
    def decode(self, ids_N: Tensor, positions: list[int]) -> Tensor:
        """One forward pass over one token of each text."""
        self.cache.extend(copy_to_device(positions, self.device)[:, None], max(positions) + 1)
        return self.net.logits(self.net(ids_N.clamp(min=0)[:, None], cache=self.cache)[:, 0])

    @torch.inference_mode()
    def move(self, source: int, target: int, used: int) -> None:
        """Copy the first `used` tokens of one slot into another."""
        self.cache.move(source, target, used)

    @torch.inference_mode()
    def reorder(self, sources: list[int], used: int) -> None:
        """Fill the first slots with the first `used` tokens of the slots `sources`, for beam search."""
        self.cache.reorder(copy_to_device(sources, self.device), used)


def open_slots(net: BaseNet, slots: int, length: int) -> Slots:
    """The family's own fast decoding, if it has one for this device (decode_torch.py); else the generic one."""
    module = find_family_module(net.shape, "decode_torch")
    found: Slots = (
        module.FastSlots(net, slots, length) if module and module.usable(net) else NetSlots(net, slots, length)
    )
    return found


def bytes_per_slot(net: BaseNet, length: int) -> int:
    """Bytes of KV cache for one text of `length` tokens."""
    heads, head_width = net.cache_shape
    return 2 * net.shape.layers * length * heads * head_width * net.head.element_size()
