"""GPT-2 at work for many texts at once: keys and values in slots, each text at a length of its own.

Shapes in names: N texts, T tokens, E width, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LONGER = 128
"""A captured step looks at so many places more than the one before it, so that few of them are needed."""


class Slots:
    """Memory for the keys and values of so many texts, taken once; the texts at work stand in the first slots."""

    def __init__(self, net: Any, slots: int, length: int) -> None:
        shape, weight = net.shape, net.wte.weight
        self.net, self.slots, self.length, self.device = net, slots, length, weight.device
        size = (shape.layers, slots, shape.heads, length, shape.width // shape.heads)
        self.keys, self.values = (torch.zeros(size, device=weight.device, dtype=weight.dtype) for _ in range(2))
        self.ids_N = torch.zeros(slots, dtype=torch.long, device=weight.device)
        self.places_N = torch.zeros(slots, dtype=torch.long, device=weight.device)
        self.graphs: dict[tuple[int, int], tuple[Any, Tensor]] = {}

    @staticmethod
    def bytes_of(net: Any, length: int) -> int:
        """Memory that one slot takes."""
        return int(2 * net.shape.layers * length * net.shape.width * net.wte.weight.element_size())

    @torch.inference_mode()
    def prefill(self, first: int, contexts: list[list[int]]) -> Tensor:
        """Read whole contexts into slots one after the other from `first` on; hidden states of all places.

        Shorter contexts are filled up on the right: what stands there is seen by nothing before it, and is written over later.
        """
        T, N = max(map(len, contexts)), len(contexts)
        ids_NT = torch.tensor([context + [0] * (T - len(context)) for context in contexts], device=self.device)
        x_NTE = self.net.wte(ids_NT) + self.net.wpe.weight[:T]
        for layer, block in enumerate(self.net.h):
            q_NHTD, k_NHTD, v_NHTD = _qkv(block, x_NTE, self.net.shape.heads)
            self.keys[layer, first : first + N, :, :T] = k_NHTD
            self.values[layer, first : first + N, :, :T] = v_NHTD
            x_NTE = _after(block, x_NTE, F.scaled_dot_product_attention(q_NHTD, k_NHTD, v_NHTD, is_causal=True))
        hidden: Tensor = self.net.ln_f(x_NTE)
        return hidden

    @torch.inference_mode()
    def decode(self, ids_N: Tensor, places: list[int]) -> Tensor:
        """One more token for each of the first slots, at its own place; scores of what comes after it."""
        count, longest = len(places), max(places) + 1
        self.ids_N[:count] = ids_N
        places_N = torch.tensor(places)
        if self.device.type == "cuda":
            self.places_N[:count].copy_(places_N.pin_memory(), non_blocking=True)
            return self._replayed(count, longest)[:count]
        self.places_N[:count] = places_N
        return self._step(count, longest)

    @torch.inference_mode()
    def move(self, source: int, target: int, used: int) -> None:
        """Put one slot's text into another slot."""
        for cache in (self.keys, self.values):
            cache[:, target, :, :used] = cache[:, source, :, :used]

    @torch.inference_mode()
    def take(self, sources: list[int], used: int) -> None:
        """Fill the first slots with what stands in these."""
        rows = torch.tensor(sources, device=self.device)
        for cache in (self.keys, self.values):
            cache[:, : len(sources), :, :used] = cache[:, rows, :, :used]

    def _step(self, count: int, longest: int) -> Tensor:
        ids_N, places_N = self.ids_N[:count], self.places_N[:count]
        rows_N = torch.arange(count, device=self.device)
        seen_N11T = (torch.arange(longest, device=self.device) <= places_N[:, None])[:, None, None]
        x_N1E = (self.net.wte(ids_N) + self.net.wpe(places_N))[:, None]
        for layer, block in enumerate(self.net.h):
            q_NH1D, k_NH1D, v_NH1D = _qkv(block, x_N1E, self.net.shape.heads)
            keys, values = self.keys[layer], self.values[layer]
            keys[rows_N, :, places_N] = k_NH1D[:, :, 0]
            values[rows_N, :, places_N] = v_NH1D[:, :, 0]
            y_NH1D = F.scaled_dot_product_attention(q_NH1D, keys[:count, :, :longest], values[:count, :, :longest], attn_mask=seen_N11T)
            x_N1E = _after(block, x_N1E, y_NH1D)
        scores: Tensor = self.net.logits(self.net.ln_f(x_N1E))[:, 0]
        return scores

    def _replayed(self, count: int, longest: int) -> Tensor:
        """The step as a captured CUDA graph, of the next larger size that was captured; spare rows work on slots that are free."""
        count = min(1 << (count - 1).bit_length(), self.slots)
        longest = min(-(-longest // LONGER) * LONGER, self.length)
        if (count, longest) not in self.graphs:
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._step(count, longest)
            torch.cuda.current_stream(self.device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                scores = self._step(count, longest)
            self.graphs[count, longest] = graph, scores
        graph, scores = self.graphs[count, longest]
        graph.replay()
        return scores


def _qkv(block: Any, x_NTE: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; they stand by head."""
    N, T, _ = x_NTE.shape
    qkv = block.attn.c_attn(block.ln_1(x_NTE)).view(N, T, heads, 3, -1)
    q_NHTD, k_NHTD, v_NHTD = (part.transpose(1, 2) for part in qkv.unbind(3))
    return q_NHTD, k_NHTD, v_NHTD


def _after(block: Any, x_NTE: Tensor, y_NHTD: Tensor) -> Tensor:
    """What the block makes of its attention's answer."""
    x_NTE = x_NTE + block.attn.c_proj(y_NHTD.transpose(1, 2).flatten(2))
    out: Tensor = x_NTE + block.mlp(block.ln_2(x_NTE))
    return out
