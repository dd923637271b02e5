"""Decoding many texts at once with any causal net: a slot of the KV cache for each text (continuous batching).

Shapes in names: N texts, T tokens, E width, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from textmill.kernels.transfer_torch import on_device
from textmill.models import find_part
from textmill.models.base_torch import BaseNet
from textmill.models.cache_torch import Cache

PREFILL_TOKENS = 4096
"""Most tokens of prompts, padding counted, that one prefill reads, unless a single prompt has more."""


class Slots(Protocol):
    """The KV cache of running texts, which are in the first slots, each at a length of its own."""

    net: BaseNet
    slots: int
    length: int
    device: torch.device

    def warm(self) -> int:
        """Do ahead what would make a text wait, such as capturing CUDA graphs; how many things were done."""
        ...

    def together(self, count: int, longest: int) -> bool:
        """Whether so many prompts, the longest of which has so many tokens, are read in one prefill."""
        ...

    def prefill(self, first: int, contexts: list[list[int]]) -> Tensor:
        """Read contexts into consecutive slots from `first` on; hidden states of all their tokens, padded on the right."""
        ...

    def decode(self, ids_N: Tensor, positions: list[int]) -> Tensor:
        """Add one token to each of the first slots, at its own position; logits of what follows it. An id below 0 counts as 0."""
        ...

    def move(self, source: int, target: int, used: int) -> None:
        """Copy one slot's text of so many tokens into another slot."""
        ...

    def take(self, sources: list[int], used: int) -> None:
        """Fill the first slots with the texts of these."""
        ...


class NetSlots:
    """Slots for any causal net, through `net(ids, cache=...)`."""

    def __init__(self, net: BaseNet, slots: int, length: int) -> None:
        weight = net.head
        self.net, self.slots, self.length, self.device = net, slots, length, weight.device
        self.cache = Cache(net.shape.layers, *net.cache_shape, slots, length, weight.device, weight.dtype)

    def warm(self) -> int:
        """Nothing to do."""
        return 0

    def together(self, count: int, longest: int) -> bool:
        """A limit on the tokens of one prefill."""
        return count * longest <= PREFILL_TOKENS

    @torch.inference_mode()
    def prefill(self, first: int, contexts: list[list[int]]) -> Tensor:
        """One forward pass; nothing before the padding of shorter contexts attends to it, and it is overwritten later."""
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
        self.cache.extend(on_device(positions, self.device)[:, None], max(positions) + 1)
        return self.net.logits(self.net(ids_N.clamp(min=0)[:, None], cache=self.cache)[:, 0])

    @torch.inference_mode()
    def move(self, source: int, target: int, used: int) -> None:
        """Copy one slot's text of so many tokens into another slot."""
        self.cache.move(source, target, used)

    @torch.inference_mode()
    def take(self, sources: list[int], used: int) -> None:
        """Fill the first slots with the texts of these."""
        self.cache.take(on_device(sources, self.device), used)


def open_slots(net: BaseNet, slots: int, length: int) -> Slots:
    """Slots of the family's own fast decoding where it has one for this device (decode_torch.py), else generic ones."""
    module = find_part(net.shape, "decode_torch")
    found: Slots = (
        module.FastSlots(net, slots, length) if module and module.usable(net) else NetSlots(net, slots, length)
    )
    return found


def bytes_per_slot(net: BaseNet, length: int) -> int:
    """Memory that the keys and values of one text of so many tokens take."""
    heads, head_width = net.cache_shape
    return 2 * net.shape.layers * length * heads * head_width * net.head.element_size()
