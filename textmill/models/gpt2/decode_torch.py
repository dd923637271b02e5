"""GPT-2 at work for many texts at once: keys and values in slots, each text at a length of its own.

Shapes in names: N texts, T tokens, E width, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from textmill.kernels.graph_capture_torch import capturing
from textmill.kernels.transfer_torch import on_device

try:
    from textmill.kernels import decode_triton as fused
except ImportError:  # no kernel can be built here
    fused = None  # type: ignore[assignment]


AT_ONCE, SHORTEST = 4096, 32
"""Tokens of prompts, filled up, that are read in one go, at most, unless one alone has more; and the least that each is filled up to.
A GPU captures all such readings: one of a new shape costs it a hundred times its work."""


class Slots:
    """Memory for the keys and values of so many texts, taken once; the texts at work stand in the first slots."""

    def __init__(self, net: Any, slots: int, length: int) -> None:
        shape, weight = net.shape, net.wte.weight
        self.net, self.slots, self.length, self.device = net, slots, length, weight.device
        # A token's key and value stand side by side, as the net makes them. One slot more is for rows that only fill a shape up.
        size = (shape.layers, slots + 1, length, shape.heads, 2, shape.width // shape.heads)
        self.cache = torch.zeros(size, device=weight.device, dtype=weight.dtype)
        self.ids_N = torch.zeros(slots, dtype=torch.long, device=weight.device)
        self.places_N = torch.zeros(slots, dtype=torch.long, device=weight.device)
        self.next: list[int] = []
        """What stands in `places_N` after the last step: each place counts on by itself."""
        self.captured = weight.is_cuda and fused is not None
        self.arrivals = torch.zeros(slots * shape.heads, dtype=torch.int32, device=weight.device)
        """Counters of attention's parts; always 0 between steps."""
        self.graphs: dict[int, tuple[Any, Tensor]] = {}
        self.readings: dict[tuple[int, int], tuple[Any, Tensor, Tensor, Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.captured else None

    @staticmethod
    def bytes_of(net: Any, length: int) -> int:
        """Memory that one slot takes."""
        return int(2 * net.shape.layers * length * net.shape.width * net.wte.weight.element_size())

    @torch.inference_mode()
    def warm(self) -> int:
        """Capture every step and reading that texts will need, so that none of them waits for it; how many there are."""
        if not self.captured:
            return 0
        counts, shapes = steps_of(self.slots), readings_of(self.slots, self.length)
        for count in counts:
            self._graph_of(count)
        for rows, long in shapes:
            self._reading_of(rows, long)
        return len(counts) + len(shapes)

    def together(self, count: int, long: int) -> bool:
        """Whether so many prompts, of which the longest has so many tokens, are read in one go."""
        rows, long = filled(count, long) if self.captured else (count, long)
        return rows * long <= AT_ONCE

    @torch.inference_mode()
    def prefill(self, first: int, contexts: list[list[int]]) -> Tensor:
        """Read whole contexts into slots one after the other from `first` on; hidden states of all places.

        Shorter contexts are filled up on the right: what stands there is seen by nothing before it, and is written over later.
        """
        T, N = max(map(len, contexts)), len(contexts)
        rows, long = filled(N, T)
        captured = self.captured and self.together(N, T) and long <= self.length
        if not captured:
            rows, long = N, T
        ids_NT = torch.tensor([context + [0] * (long - len(context)) for context in [*contexts, *[[]] * (rows - N)]])
        slots_N = torch.tensor([*range(first, first + N), *[self.slots] * (rows - N)])
        if not captured:
            return self._read(ids_NT.to(self.device), slots_N.to(self.device))
        graph, static_NT, static_N, hidden_NTE = self._reading_of(rows, long)
        static_NT.copy_(ids_NT.pin_memory(), non_blocking=True)
        static_N.copy_(slots_N.pin_memory(), non_blocking=True)
        graph.replay()
        return hidden_NTE[:N, :T]

    def _read(self, ids_NT: Tensor, slots_N: Tensor) -> Tensor:
        N, T = ids_NT.shape
        x_NTE = self.net.wte(ids_NT) + self.net.wpe.weight[:T]
        for block, cache in zip(self.net.h, self.cache, strict=True):
            qkv = block.attn.c_attn(block.ln_1(x_NTE)).view(N, T, self.net.shape.heads, 3, -1)
            cache[slots_N, :T] = qkv[:, :, :, 1:]
            q_NHTD, k_NHTD, v_NHTD = (part.transpose(1, 2) for part in qkv.unbind(3))
            y_NHTD = F.scaled_dot_product_attention(q_NHTD, k_NHTD, v_NHTD, is_causal=True)
            x_NTE = x_NTE + block.attn.c_proj(y_NHTD.transpose(1, 2).flatten(2))
            x_NTE = x_NTE + block.mlp(block.ln_2(x_NTE))
        hidden: Tensor = self.net.ln_f(x_NTE)
        return hidden

    def _reading_of(self, rows: int, long: int) -> tuple[Any, Tensor, Tensor, Tensor]:
        if (rows, long) not in self.readings:
            self.readings[rows, long] = self._capture_reading(rows, long)
        return self.readings[rows, long]

    def _capture_reading(self, rows: int, long: int) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Reading prompts of a shape; what is read meanwhile goes into the slot that is nobody's."""
        ids_NT = torch.zeros(rows, long, dtype=torch.long, device=self.device)
        slots_N = torch.full((rows,), self.slots, device=self.device)
        graph, hidden_NTE = self._captured(lambda: self._read(ids_NT, slots_N), lambda: None)
        return graph, ids_NT, slots_N, hidden_NTE

    @torch.inference_mode()
    def decode(self, ids_N: Tensor, places: list[int]) -> Tensor:
        """One more token for each of the first slots, at its own place; scores of what comes after it. An id below 0 is taken for 0."""
        count = len(places)
        self.ids_N[:count] = ids_N
        if places != self.next:
            self.places_N[:count] = on_device(places, self.device)
        self.next = []  # unless the step succeeds, nothing is known of them
        scores_NV = (
            self._replayed(count)[:count]
            if self.captured
            else self._step(count, _plain_states(self, count, max(places) + 1))
        )
        self.next = [place + 1 for place in places]
        return scores_NV

    @torch.inference_mode()
    def move(self, source: int, target: int, used: int) -> None:
        """Put one slot's text into another slot."""
        self.cache[:, target, :used] = self.cache[:, source, :used]

    @torch.inference_mode()
    def take(self, sources: list[int], used: int) -> None:
        """Fill the first slots with what stands in these."""
        self.cache[:, : len(sources), :used] = self.cache[:, on_device(sources, self.device), :used]

    def _step(self, count: int, hidden_NE: Tensor) -> Tensor:
        """Scores after the last states; every place counts on."""
        # A slot without a text counts on too, and may not run out of its memory.
        self.places_N[:count].add_(1).clamp_(max=self.length - 1)
        scores: Tensor = self.net.logits(hidden_NE)
        return scores

    def _replayed(self, count: int) -> Tensor:
        """The step as a captured CUDA graph, of the next larger size that was captured; spare rows work on slots that are free."""
        graph, scores = self._graph_of(min(power_of(count), self.slots))
        graph.replay()
        return scores

    def _graph_of(self, count: int) -> tuple[Any, Tensor]:
        if count not in self.graphs:
            self.graphs[count] = self._capture(count)
        return self.graphs[count]

    def _capture(self, count: int) -> tuple[Any, Tensor]:
        states, places_N = (
            _few_states if count <= fused.FEW and _is_plain(self.net) else _fused_states,
            self.places_N.clone(),
        )
        return self._captured(lambda: self._step(count, states(self, count)), lambda: self.places_N.copy_(places_N))

    def _captured(self, work: Callable[[], Tensor], undo: Callable[[], object]) -> tuple[Any, Tensor]:
        """Work as a CUDA graph and where its result will stand; it is done twice before, and undone.

        All graphs share their memory: a result is used up, in the stream's order, before another is replayed.
        """
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
                undo()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self.pool):
            result = work()
        return graph, result


def power_of(count: int) -> int:
    """The least power of two that is not below a count."""
    return 1 << max(0, count - 1).bit_length()


def filled(count: int, long: int) -> tuple[int, int]:
    """The shape that prompts are filled up to where readings are captured: rows and tokens."""
    return power_of(count), max(SHORTEST, power_of(long))


def steps_of(slots: int) -> list[int]:
    """Numbers of texts that steps are captured for."""
    return sorted({min(power_of(count), slots) for count in range(1, slots + 1)})


def readings_of(slots: int, length: int) -> list[tuple[int, int]]:
    """Shapes of prompts, rows and tokens, that readings are captured for: those that so many slots of this length can come to ask for."""
    rows, longs = (
        sorted({filled(count, 1)[0] for count in range(1, slots + 1)}),
        sorted({filled(1, T)[1] for T in range(1, length)}),
    )
    return [(row, long) for row in rows for long in longs if row * long <= AT_ONCE and long <= length]


def _is_plain(net: Any) -> bool:
    """Whether no matrix has an adapter beside it."""
    matrices = [
        matrix for block in net.h for matrix in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)
    ]
    return all(type(matrix) is nn.Linear for matrix in matrices)


def _plain_states(slots: Slots, count: int, longest: int) -> Tensor:
    """The last states of a step in torch's own operations; `longest` places are looked at."""
    net, places_N = slots.net, slots.places_N[:count]
    rows_N, heads = torch.arange(count, device=slots.device), net.shape.heads
    seen_N11T = (torch.arange(longest, device=slots.device) <= places_N[:, None])[:, None, None]
    x_NE = net.wte(slots.ids_N[:count].clamp(min=0)) + net.wpe(places_N)
    for block, cache in zip(net.h, slots.cache, strict=True):
        qkv_NH3D = block.attn.c_attn(block.ln_1(x_NE)).view(count, heads, 3, -1)
        cache[rows_N, places_N] = qkv_NH3D[:, :, 1:]
        keys_NHTD, values_NHTD = cache[:count, :longest].transpose(1, 2).unbind(3)
        y_NH1D = F.scaled_dot_product_attention(qkv_NH3D[:, :, :1], keys_NHTD, values_NHTD, attn_mask=seen_N11T)
        x_NE = x_NE + block.attn.c_proj(y_NH1D.flatten(1))
        x_NE = x_NE + block.mlp(block.ln_2(x_NE))
    hidden_NE: Tensor = net.ln_f(x_NE)
    return hidden_NE


def _fused_states(slots: Slots, count: int) -> Tensor:
    """The same with one kernel for each part that stands between two matrices."""
    net, places_N, heads = slots.net, slots.places_N[:count], slots.net.shape.heads
    x_NE: Tensor = fused.embed(slots.ids_N[:count], places_N, net.wte.weight, net.wpe.weight)
    h_NE: Tensor = net.h[0].ln_1(x_NE)
    for block, cache, norm in zip(net.h, slots.cache, [*(block.ln_1 for block in net.h[1:]), net.ln_f], strict=True):
        y_NE = fused.attend(block.attn.c_attn(h_NE).view(count, heads, 3, -1), cache, places_N, slots.arrivals)
        x_NE, h_NE = _added(x_NE, y_NE, block.attn.c_proj, block.ln_2)
        x_NE, h_NE = _added(x_NE, _inner(block.mlp, h_NE), block.mlp.c_proj, norm)
    return h_NE


def _few_states(slots: Slots, count: int) -> Tensor:
    """The same with one kernel for each matrix and all that stands beside it: with few texts, to start kernels is what takes time."""
    net, places_N, heads = slots.net, slots.places_N[:count], slots.net.shape.heads
    x_NE: Tensor = fused.embed(slots.ids_N[:count], places_N, net.wte.weight, net.wpe.weight)
    for block, cache in zip(net.h, slots.cache, strict=True):
        qkv_NF = fused.product(x_NE, block.attn.c_attn, norm=block.ln_1)
        y_NE = fused.attend(qkv_NF.view(count, heads, 3, -1), cache, places_N, slots.arrivals)
        x_NE = fused.product(y_NE, block.attn.c_proj, added=x_NE)
        inner_NF = fused.product(x_NE, block.mlp.c_fc, norm=block.ln_2, gelu=block.mlp.approximate)
        x_NE = fused.product(inner_NF, block.mlp.c_proj, added=x_NE)
    hidden_NE: Tensor = net.ln_f(x_NE)
    return hidden_NE


def _inner(mlp: Any, h_NE: Tensor) -> Tensor:
    """What stands between the MLP's matrices; its GELU comes with the product where cuBLAS has it."""
    if mlp.approximate != "tanh" or type(mlp.c_fc) is not nn.Linear:
        states: Tensor = mlp.inner(h_NE)
        return states
    return torch._addmm_activation(mlp.c_fc.bias, h_NE, mlp.c_fc.weight.T, use_gelu=True)


def _added(x_NE: Tensor, y_NE: Tensor, linear: Any, norm: Any) -> tuple[Tensor, Tensor]:
    """The stream with what a matrix makes of y added, and its norm."""
    if type(linear) is not nn.Linear:  # one with an adapter beside it
        x_NE = x_NE + linear(y_NE)
        return x_NE, norm(x_NE)
    added: tuple[Tensor, Tensor] = fused.add_norm(x_NE, F.linear(y_NE, linear.weight), linear.bias, norm)
    return added
