"""Decoding many texts at once with any causal net: a slot of the KV cache for each text (continuous batching).

A family may write `_hidden`, one step of its net, from the kernels of kernels/decode_triton.py
(models/NAME/decode_torch.py). Then every step and prefill on a GPU is a captured CUDA graph; on a CPU the same step
runs with the functions of kernels/decode_cpu.py.

Shapes in names: N texts, T tokens, E width, F width of a matrix's output, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from textmill.devices import copy_to_device
from textmill.kernels import decode_cpu, decode_triton
from textmill.kernels.graphs_torch import capture_graph
from textmill.kernels.triton_support import HAS_TRITON
from textmill.models import find_family_module
from textmill.models.base_torch import BaseNet, Cache

PREFILL_TOKENS = 4096
"""Most prompt tokens, including padding, that one prefill reads, unless a single prompt has more."""
LEAST_REUSED = 16
"""See `NetSlots.least_reused`."""
LEAST_REUSED_CAPTURED = 1024
"""The same if prefills are CUDA graphs: the pass over the rest is none, and launches its kernels one by one."""


class NetSlots:
    """The KV cache of running texts, which occupy the first slots, each with its own length, for any causal net, by
    `net(ids, cache=...)`."""

    least_reused = LEAST_REUSED
    """Tokens in common with an earlier text from which on copying them is faster than reading them."""

    def __init__(self, net: BaseNet, slots: int, length: int, dtype: torch.dtype | None = None) -> None:
        """`dtype` is that of the cache; default: that of the weights."""
        weight = net.head
        self.net = net
        self.slots = slots
        self.length = length
        self.device = weight.device
        self.cache: Any = net.new_cache(slots, length, weight.device, dtype or weight.dtype)

    def warm_up(self) -> int:
        """Do in advance what would delay the first texts: capture CUDA graphs; return how many were captured."""
        return 0

    def fits_one_prefill(self, count: int, longest: int) -> bool:
        """True if `count` prompts, the longest with `longest` tokens, can be read in one prefill."""
        return count * longest <= PREFILL_TOKENS

    @torch.inference_mode()
    def prefill(self, first: int, contexts: list[list[int]]) -> Tensor:
        """Read contexts into consecutive slots, starting at `first`; return hidden states, padded on the right.

        No token attends to the padding of shorter contexts, which is overwritten later."""
        if not isinstance(self.cache, Cache | None) and len({*map(len, contexts)}) > 1:
            return self._prefill_by_length(first, contexts)
        longest = max(map(len, contexts))
        ids_NT = torch.tensor([context + [0] * (longest - len(context)) for context in contexts])
        slots_N = torch.arange(first, first + len(contexts))
        return self._read(ids_NT.to(self.device), slots_N.to(self.device))

    def _prefill_by_length(self, first: int, contexts: list[list[int]]) -> Tensor:
        """A pass for each length, since the padding of shorter contexts would change a cache of the family's own."""
        longest = max(map(len, contexts))
        hidden_NTE = torch.zeros(len(contexts), longest, self.net.head.shape[1], device=self.device)
        for length in {*map(len, contexts)} - {0}:
            rows = [row for row, context in enumerate(contexts) if len(context) == length]
            ids_NT = torch.tensor([contexts[row] for row in rows], device=self.device)
            hidden_NTE[rows, :length] = self._read(ids_NT, torch.tensor(rows, device=self.device) + first).float()
        return hidden_NTE

    def _read(self, ids_NT: Tensor, slots_N: Tensor) -> Tensor:
        self.cache.read(slots_N)
        hidden_NTE: Tensor = self.net(ids_NT, cache=self.cache)
        return hidden_NTE

    @torch.inference_mode()
    def resume(self, slot: int, start: int, ids: list[int]) -> None:
        """Read more tokens into a slot that holds `start` tokens. The net must have an attention cache."""
        stop = start + len(ids)
        self.cache.extend(torch.arange(start, stop, device=self.device)[None], stop, first=slot)
        self.net(torch.tensor([ids], device=self.device), cache=self.cache)

    @torch.inference_mode()
    def save(self, slot: int, used: int) -> Tensor:
        """A copy of the keys and values of the first `used` tokens of a slot."""
        copy: Tensor = self.cache.memory[:, slot, :used].clone()
        return copy

    @torch.inference_mode()
    def restore(self, slot: int, saved: Tensor, used: int) -> None:
        """Fill a slot with the first `used` tokens of a copy."""
        self.cache.memory[:, slot, :used] = saved[:, :used]

    @torch.inference_mode()
    def decode(self, ids_N: Tensor, positions: list[int]) -> Tensor:
        """Add one token to each of the first slots, at its own position; return the logits of the next token.

        An id below 0 counts as 0."""
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


class FullPassSlots(NetSlots):
    """Slots for a net without a cache: they hold the tokens, and each step is a pass over the whole texts."""

    def __init__(self, net: BaseNet, slots: int, length: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(net, slots, length, dtype)
        self.ids = torch.zeros(slots + 1, length, dtype=torch.long, device=self.device)

    def _read(self, ids_NT: Tensor, slots_N: Tensor) -> Tensor:
        self.ids[slots_N, : ids_NT.shape[1]] = ids_NT
        hidden_NTE: Tensor = self.net(ids_NT)
        return hidden_NTE

    @torch.inference_mode()
    def decode(self, ids_N: Tensor, positions: list[int]) -> Tensor:
        """One forward pass over all tokens of each text; later tokens change nothing."""
        rows_N = torch.arange(len(positions), device=self.device)
        places_N = copy_to_device(positions, self.device)
        self.ids[rows_N, places_N] = ids_N.clamp(min=0)
        hidden_NTE = self.net(self.ids[: len(positions), : max(positions) + 1])
        return self.net.logits(hidden_NTE[rows_N, places_N])

    def move(self, source: int, target: int, used: int) -> None:
        """Copy one slot into another."""
        self.ids[target] = self.ids[source]

    def reorder(self, sources: list[int], used: int) -> None:
        """Fill the first slots with the slots `sources`, for beam search."""
        self.ids[: len(sources)] = self.ids[copy_to_device(sources, self.device)]


def open_slots(net: BaseNet, slots: int, length: int) -> NetSlots:
    """The family's own fast decoding, if it has one for this net and device (decode_torch.py); else the generic one."""
    module = find_family_module(net.shape, "decode_torch")
    if module is None or not usable(net):
        return net_slots(net, slots, length)
    found: CapturedSlots = module.FastSlots(net, slots, length, captured=net.head.is_cuda)
    return found if found.captured or found.can_fuse() else net_slots(net, slots, length)


def net_slots(net: BaseNet, slots: int, length: int, dtype: torch.dtype | None = None) -> NetSlots:
    """The generic slots, for the cache that the net has, or without one."""
    has_cache = net.has_attention_cache or bytes_per_slot(net, length)
    return (NetSlots if has_cache else FullPassSlots)(net, slots, length, dtype)


def bytes_per_slot(net: BaseNet, length: int) -> int:
    """Bytes of the cache for one text of `length` tokens; 0 if the net has none."""
    cache = net.new_cache(0, length, torch.device("meta"), net.head.dtype)
    return 0 if cache is None else cache.memory.nbytes


SHORTEST = 32
"""Prompts are padded to a power of two, at least this: capturing a shape takes 100 times as long as replaying it."""


def usable(net: BaseNet) -> bool:
    """True if the kernels can run this net on its device; they have no adapters, which `open_net` merges."""
    if net.lora is not None:
        return False
    return HAS_TRITON if net.head.is_cuda else net.head.device.type == "cpu" and net.head.dtype == torch.float32


class CapturedSlots(NetSlots):
    """Slots with a family's own step; on a GPU steps and prefills are captured CUDA graphs."""

    kernels: Any = decode_triton

    def __init__(self, net: BaseNet, slots: int, length: int, *, captured: bool = True) -> None:
        super().__init__(net, slots, length)
        self.captured = captured
        """False on a CPU: a step runs as it is written, always with the kernels for few texts."""
        if captured:
            self.least_reused = LEAST_REUSED_CAPTURED
        else:
            self.kernels = decode_cpu.Kernels(self.cache.memory)
            transpose_matrices(net)
            self.head = net.head  # the net finds it by its name each time
        self.ids_N = torch.zeros(slots, dtype=torch.long, device=self.device)
        self.positions_N = torch.zeros(slots, dtype=torch.long, device=self.device)
        self.next: list[int] = []
        """The values of `positions_N` after the last step: the captured step advances them on the GPU."""
        self.arrivals = torch.zeros(slots * net.shape.heads, dtype=torch.int32, device=self.device)
        """Counters of finished partial attention results; always 0 between steps."""
        self.steps: dict[int, tuple[Any, Tensor]] = {}
        self.prefills: dict[tuple[int, int], tuple[Any, Tensor, Tensor, Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle() if captured else None
        self.sampling: Any = None
        """The graphs that choose tokens from the logits of the steps."""

    def read_layer(self, module: nn.Module) -> Any:
        """What `_hidden` has for a linear layer or a norm: on a CPU tuples of tensors, which are read faster."""
        return module if self.captured else decode_cpu.read_layer(module)

    def cache_of(self, layer: int) -> Any:
        """What `attend` of the kernels reads and writes."""
        return self.cache.memory[layer] if self.captured else self.kernels.caches[layer]

    def can_fuse(self) -> bool:
        """True if `_hidden` has kernels for few texts, which do the matmuls too, for this net."""
        raise NotImplementedError

    def _hidden(self, count: int, *, few: bool) -> Tensor:
        """The last hidden states [N, E] of a step that adds `ids_N` at `positions_N`; `few`: with the kernels for few
        texts."""
        raise NotImplementedError

    @torch.inference_mode()
    def warm_up(self) -> int:
        """Capture every step and prefill that texts can need, so that no text waits for a capture; return how many."""
        if not self.captured:
            return 0
        counts = step_sizes(self.slots)
        shapes = prefill_shapes(self.slots, self.length)
        for count in counts:
            self._step_graph(count)
        for rows, tokens in shapes:
            self._prefill_graph(rows, tokens)
        return len(counts) + len(shapes)

    def fits_one_prefill(self, count: int, longest: int) -> bool:
        """A limit on the tokens of one prefill, including padding."""
        return super().fits_one_prefill(*(padded_shape(count, longest) if self.captured else (count, longest)))

    @torch.inference_mode()
    def prefill(self, first: int, contexts: list[list[int]]) -> Tensor:
        """Replay the captured prefill of the next larger shape; padding rows go into the extra slot."""
        T = max(map(len, contexts))
        N = len(contexts)
        rows, tokens = padded_shape(N, T)
        if not self.captured or not self.fits_one_prefill(N, T) or tokens > self.length:
            return super().prefill(first, contexts)
        ids_NT = torch.tensor([context + [0] * (tokens - len(context)) for context in [*contexts, *[[]] * (rows - N)]])
        slots_N = torch.tensor([*range(first, first + N), *[self.slots] * (rows - N)])
        graph, static_NT, static_N, hidden_NTE = self._prefill_graph(rows, tokens)
        static_NT.copy_(ids_NT.pin_memory(), non_blocking=True)
        static_N.copy_(slots_N.pin_memory(), non_blocking=True)
        graph.replay()
        return hidden_NTE[:N, :T]

    def _prefill_graph(self, rows: int, tokens: int) -> tuple[Any, Tensor, Tensor, Tensor]:
        if (rows, tokens) not in self.prefills:
            ids_NT = torch.zeros(rows, tokens, dtype=torch.long, device=self.device)
            slots_N = torch.full((rows,), self.slots, device=self.device)
            graph, hidden_NTE = self.capture(lambda: self._read(ids_NT, slots_N), lambda: None)
            self.prefills[rows, tokens] = graph, ids_NT, slots_N, hidden_NTE
        return self.prefills[rows, tokens]

    @torch.inference_mode()
    def decode(self, ids_N: Tensor, positions: list[int]) -> Tensor:
        """Replay the captured step of the next larger size; spare rows work on free slots."""
        count = len(positions)
        if not self.captured:
            self.kernels.begin(positions)
            self.ids_N = ids_N  # none is below 0: on a CPU no step begins before the ids of the last are received
            self.positions_N = self.positions_N.add_(1) if positions == self.next else torch.tensor(positions)
            self.next = [position + 1 for position in positions]
            return F.linear(self._hidden(count, few=True), self.head)[:, : self.net.shape.vocab]
        self.ids_N[:count] = ids_N
        if positions != self.next:
            self.positions_N[:count] = copy_to_device(positions, self.device)
        self.next = []  # stays empty if the step fails: the positions are unknown then
        graph, logits_NV = self._step_graph(min(power_of_two(count), self.slots))
        graph.replay()
        self.next = [position + 1 for position in positions]
        return logits_NV[:count]

    def _step_graph(self, count: int) -> tuple[Any, Tensor]:
        if count not in self.steps:
            few = count <= self.kernels.MAX_FUSED_TEXTS and self.can_fuse()
            positions_N = self.positions_N.clone()
            self.steps[count] = self.capture(
                lambda: self._step(count, few=few), lambda: self.positions_N.copy_(positions_N)
            )
        return self.steps[count]

    def _step(self, count: int, *, few: bool) -> Tensor:
        """Logits after one more token of each text; every position advances by one."""
        hidden_NE = self._hidden(count, few=few)
        # A slot without a text advances too, and must stay inside its memory.
        self.positions_N[:count].add_(1).clamp_(max=self.length - 1)
        return self.net.logits(hidden_NE)

    def _add_linear(self, x_NE: Tensor, y_NE: Tensor, linear: Any, norm: Any, *, few: bool) -> tuple[Tensor, Tensor]:
        """The residual stream plus linear(y), and its norm; with few texts the next matmul computes the norm itself."""
        if few:
            x_NE = self.kernels.fused_linear(y_NE, linear, added=x_NE)
            return x_NE, x_NE
        added: tuple[Tensor, Tensor] = self.kernels.add_norm(x_NE, F.linear(y_NE, linear.weight), linear.bias, norm)
        return added

    def capture(self, work: Callable[[], Tensor], undo: Callable[[], object]) -> tuple[Any, Tensor]:
        """Capture `work` as a CUDA graph; return the graph and the tensor with its result.

        `work` runs twice before, as a warm-up, and `undo` reverts each run. All graphs share their memory: a result is
        consumed, in stream order, before another graph is replayed.
        """
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
                undo()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with capture_graph(graph, self.pool):
            result = work()
        return graph, result


def transpose_matrices(net: nn.Module) -> None:
    """Store each matrix column by column, which torch's matmul on a CPU reads twice as fast for a few rows."""
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            join_rows([module.weight], transposed=True)


def join_rows(tensors: Sequence[Tensor], *, transposed: bool = False) -> Tensor:
    """One tensor with the rows of all, which become views of it; nothing is copied if they are already.

    `transposed`: it is stored column by column."""
    first = tensors[0]
    rows = [len(tensor) for tensor in tensors]
    sizes = [len(tensor) * tensor.itemsize if transposed else tensor.nbytes for tensor in tensors]
    starts = list(accumulate(sizes, initial=first.data_ptr()))
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    is_joined = len(storages) == 1 and [tensor.data_ptr() for tensor in tensors] == starts[:-1]
    if is_joined and first.stride(0 if transposed and first.ndim == 2 else -1) == 1:
        return first.detach().as_strided((sum(rows), *first.shape[1:]), first.stride())
    with torch.inference_mode(False), torch.no_grad():
        parts = [tensor.detach().t() for tensor in tensors]
        joined = torch.cat(parts, -1).t() if transposed else torch.cat([part.t() for part in parts])
        for tensor, part in zip(tensors, torch.split(joined, rows), strict=True):
            tensor.data = part
    return joined


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()


def padded_shape(count: int, longest: int) -> tuple[int, int]:
    """The shape that prompts are padded to: rows and tokens."""
    return power_of_two(count), max(SHORTEST, power_of_two(longest))


def step_sizes(slots: int) -> list[int]:
    """The batch sizes for which steps are captured."""
    return sorted({min(power_of_two(count), slots) for count in range(1, slots + 1)})


def prefill_shapes(slots: int, length: int) -> list[tuple[int, int]]:
    """The shapes (rows, tokens) for which prefills are captured: all that this many slots of this length can need."""
    rows = sorted({padded_shape(count, 1)[0] for count in range(1, slots + 1)})
    tokens = sorted({padded_shape(1, T)[1] for T in range(1, length)})
    return [(row, many) for row in rows for many in tokens if row * many <= PREFILL_TOKENS and many <= length]
