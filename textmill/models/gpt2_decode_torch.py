"""GPT-2 at work for many texts at once: keys and values in slots, each text at a length of its own.

Shapes in names: N texts, T tokens, E width, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from textmill.models.decode_triton import add_norm, attend
except ImportError:  # Triton comes with torch's builds for GPUs
    add_norm = attend = None  # type: ignore[assignment]


class Slots:
    """Memory for the keys and values of so many texts, taken once; the texts at work stand in the first slots."""

    def __init__(self, net: Any, slots: int, length: int) -> None:
        shape, weight = net.shape, net.wte.weight
        self.net, self.slots, self.length, self.device = net, slots, length, weight.device
        # A token's key and value stand side by side, as the net makes them.
        size = (shape.layers, slots, length, shape.heads, 2, shape.width // shape.heads)
        self.cache = torch.zeros(size, device=weight.device, dtype=weight.dtype)
        self.ids_N = torch.zeros(slots, dtype=torch.long, device=weight.device)
        self.places_N = torch.zeros(slots, dtype=torch.long, device=weight.device)
        self.next: list[int] = []
        """What stands in `places_N` after the last step: each place counts on by itself."""
        self.captured = weight.is_cuda and attend is not None
        self.graphs: dict[int, tuple[Any, Tensor]] = {}

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
            qkv = block.attn.c_attn(block.ln_1(x_NTE)).view(N, T, self.net.shape.heads, 3, -1)
            self.cache[layer, first : first + N, :T] = qkv[:, :, :, 1:]
            q_NHTD, k_NHTD, v_NHTD = (part.transpose(1, 2) for part in qkv.unbind(3))
            y_NHTD = F.scaled_dot_product_attention(q_NHTD, k_NHTD, v_NHTD, is_causal=True)
            x_NTE = x_NTE + block.attn.c_proj(y_NHTD.transpose(1, 2).flatten(2))
            x_NTE = x_NTE + block.mlp(block.ln_2(x_NTE))
        hidden: Tensor = self.net.ln_f(x_NTE)
        return hidden

    @torch.inference_mode()
    def decode(self, ids_N: Tensor, places: list[int]) -> Tensor:
        """One more token for each of the first slots, at its own place; scores of what comes after it. An id below 0 is taken for 0."""
        count = len(places)
        self.ids_N[:count] = ids_N
        if places != self.next:
            places_N = torch.tensor(places)
            self.places_N[:count].copy_(places_N.pin_memory() if self.device.type == "cuda" else places_N, non_blocking=True)
        self.next = []  # unless the step succeeds, nothing is known of them
        scores_NV = self._replayed(count)[:count] if self.captured else self._step(count, _Plain(self.places_N[:count], max(places) + 1))
        self.next = [place + 1 for place in places]
        return scores_NV

    @torch.inference_mode()
    def move(self, source: int, target: int, used: int) -> None:
        """Put one slot's text into another slot."""
        self.cache[:, target, :used] = self.cache[:, source, :used]

    @torch.inference_mode()
    def take(self, sources: list[int], used: int) -> None:
        """Fill the first slots with what stands in these."""
        self.cache[:, : len(sources), :used] = self.cache[:, torch.tensor(sources, device=self.device), :used]

    def _step(self, count: int, parts: _Plain | _Fused) -> Tensor:
        net, heads = self.net, self.net.shape.heads
        x_NE = net.wte(self.ids_N[:count].clamp(min=0)) + net.wpe(self.places_N[:count])
        h_NE = net.h[0].ln_1(x_NE)
        norms = [*(block.ln_1 for block in net.h[1:]), net.ln_f]
        for block, cache, norm in zip(net.h, self.cache, norms, strict=True):
            y_NE = parts.attend(block.attn.c_attn(h_NE).view(count, heads, 3, -1), cache)
            x_NE, h_NE = parts.add_norm(x_NE, y_NE, block.attn.c_proj, block.ln_2)
            x_NE, h_NE = parts.add_norm(x_NE, block.mlp.inner(h_NE), block.mlp.c_proj, norm)
        # A slot without a text counts on too, and may not run out of its memory.
        self.places_N[:count].add_(1).clamp_(max=self.length - 1)
        scores: Tensor = net.logits(h_NE)
        return scores

    def _replayed(self, count: int) -> Tensor:
        """The step as a captured CUDA graph, of the next larger size that was captured; spare rows work on slots that are free."""
        count = min(1 << (count - 1).bit_length(), self.slots)
        if count not in self.graphs:
            self.graphs[count] = self._capture(count)
        graph, scores = self.graphs[count]
        graph.replay()
        return scores

    def _capture(self, count: int) -> tuple[Any, Tensor]:
        parts, places_N = _Fused(self.places_N[:count]), self.places_N.clone()
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._step(count, parts)
                self.places_N.copy_(places_N)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            scores = self._step(count, parts)
        return graph, scores


class _Plain:
    """What a step does between its matrices, in torch's own operations; `longest` places are looked at."""

    def __init__(self, places_N: Tensor, longest: int) -> None:
        # As they stand before the step counts them on.
        self.places_N, self.longest, self.rows_N = places_N.clone(), longest, torch.arange(len(places_N), device=places_N.device)
        self.seen_N11T = (torch.arange(longest, device=places_N.device) <= places_N[:, None])[:, None, None]

    def attend(self, qkv_NH3D: Tensor, cache: Tensor) -> Tensor:
        """Keep each text's new key and value; what its query finds, heads joined."""
        cache[self.rows_N, self.places_N] = qkv_NH3D[:, :, 1:]
        keys_NHTD, values_NHTD = cache[: len(qkv_NH3D), : self.longest].transpose(1, 2).unbind(3)
        return F.scaled_dot_product_attention(qkv_NH3D[:, :, :1], keys_NHTD, values_NHTD, attn_mask=self.seen_N11T).flatten(1)

    def add_norm(self, x_NE: Tensor, y_NE: Tensor, linear: Any, norm: Any) -> tuple[Tensor, Tensor]:
        """The stream with what a matrix makes of y added, and its norm."""
        return _added(x_NE, y_NE, linear, norm)


class _Fused:
    """The same as one kernel each."""

    def __init__(self, places_N: Tensor) -> None:
        self.places_N = places_N

    def attend(self, qkv_NH3D: Tensor, cache: Tensor) -> Tensor:
        """Keep each text's new key and value; what its query finds, heads joined."""
        return attend(qkv_NH3D, cache, self.places_N)

    def add_norm(self, x_NE: Tensor, y_NE: Tensor, linear: Any, norm: Any) -> tuple[Tensor, Tensor]:
        """The stream with what a matrix makes of y added, and its norm."""
        if type(linear) is not nn.Linear:  # one with an adapter beside it
            return _added(x_NE, y_NE, linear, norm)
        return add_norm(x_NE, F.linear(y_NE, linear.weight), linear.bias, norm)


def _added(x_NE: Tensor, y_NE: Tensor, linear: Any, norm: Any) -> tuple[Tensor, Tensor]:
    x_NE = x_NE + linear(y_NE)
    return x_NE, norm(x_NE)
