"""Decoding many texts at once with any causal net: a slot of the KV cache for each text (continuous batching).

On a GPU, a family may write `_hidden`, one step of its net, from the kernels of kernels/decode_triton.py
(models/NAME/decode_torch.py); then every step and prefill is a captured CUDA graph.

Shapes in names: N texts, T tokens, E width, F width of a matrix's output, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from textmill.kernels import decode_triton
from textmill.kernels.transfer_torch import copy_to_device
from textmill.kernels.triton_support import HAS_TRITON
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


SHORTEST = 32
"""Prompts are padded to a power of two, at least this: capturing a shape takes 100 times as long as replaying it."""


def usable(net: BaseNet) -> bool:
    """True if the kernels can run this net on its device."""
    return HAS_TRITON and net.head.is_cuda


class CapturedSlots(NetSlots):
    """Slots whose steps and prefills are captured CUDA graphs."""

    kernels: Any = decode_triton

    def __init__(self, net: BaseNet, slots: int, length: int) -> None:
        super().__init__(net, slots, length)
        self.ids_N = torch.zeros(slots, dtype=torch.long, device=self.device)
        self.positions_N = torch.zeros(slots, dtype=torch.long, device=self.device)
        self.next: list[int] = []
        """The values of `positions_N` after the last step: the captured step advances them on the GPU."""
        self.arrivals = torch.zeros(slots * net.shape.heads, dtype=torch.int32, device=self.device)
        """Counters of finished partial attention results; always 0 between steps."""
        self.steps: dict[int, tuple[Any, Tensor]] = {}
        self.prefills: dict[tuple[int, int], tuple[Any, Tensor, Tensor, Tensor]] = {}
        self.pool = torch.cuda.graph_pool_handle()

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
        counts = step_sizes(self.slots)
        shapes = prefill_shapes(self.slots, self.length)
        for count in counts:
            self._step_graph(count)
        for rows, tokens in shapes:
            self._prefill_graph(rows, tokens)
        return len(counts) + len(shapes)

    def fits_one_prefill(self, count: int, longest: int) -> bool:
        """A limit on the tokens of one prefill, including padding."""
        return super().fits_one_prefill(*padded_shape(count, longest))

    @torch.inference_mode()
    def prefill(self, first: int, contexts: list[list[int]]) -> Tensor:
        """Replay the captured prefill of the next larger shape; padding rows go into the extra slot."""
        T = max(map(len, contexts))
        N = len(contexts)
        rows, tokens = padded_shape(N, T)
        if not self.fits_one_prefill(N, T) or tokens > self.length:
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
            graph, hidden_NTE = self._capture(lambda: self._read(ids_NT, slots_N), lambda: None)
            self.prefills[rows, tokens] = graph, ids_NT, slots_N, hidden_NTE
        return self.prefills[rows, tokens]

    @torch.inference_mode()
    def decode(self, ids_N: Tensor, positions: list[int]) -> Tensor:
        """Replay the captured step of the next larger size; spare rows work on free slots."""
        count = len(positions)
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
            self.steps[count] = self._capture(
                lambda: self._step(count, few=few), lambda: self.positions_N.copy_(positions_N)
            )
        return self.steps[count]

    def _step(self, count: int, *, few: bool) -> Tensor:
        """Logits after one more token of each text; every position advances by one."""
        hidden_NE = self._hidden(count, few=few)
        # A slot without a text advances too, and must stay inside its memory.
        self.positions_N[:count].add_(1).clamp_(max=self.length - 1)
        return self.net.logits(hidden_NE)

    def _add_linear(
        self, x_NE: Tensor, y_NE: Tensor, linear: nn.Module, norm: nn.Module, *, few: bool
    ) -> tuple[Tensor, Tensor]:
        """The residual stream plus linear(y), and its norm; with few texts the next matmul computes the norm itself."""
        if type(linear) is not nn.Linear:  # it has an adapter
            x_NE = x_NE + linear(y_NE)
            return x_NE, norm(x_NE)
        if few:
            x_NE = self.kernels.fused_linear(y_NE, linear, added=x_NE)
            return x_NE, x_NE
        added: tuple[Tensor, Tensor] = self.kernels.add_norm(x_NE, F.linear(y_NE, linear.weight), linear.bias, norm)
        return added

    def _capture(self, work: Callable[[], Tensor], undo: Callable[[], object]) -> tuple[Any, Tensor]:
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


def has_no_adapter(layers: Iterable[nn.Module]) -> bool:
    """True if all are plain linear layers, whose weights a kernel can read itself."""
    return all(type(layer) is nn.Linear for layer in layers)


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


@contextmanager
def capture_graph(graph: Any, pool: Any) -> Iterator[None]:
    """Capture everything done inside the `with` block into `graph`.

    The cuBLAS workspaces are cleared before and after, so that cuBLAS allocates its workspace from the graph's own
    memory pool. Otherwise torch's compiler, which frees all workspaces now and then, would leave the graph with freed
    memory.
    """
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.graph(graph, pool=pool):
        yield
    torch._C._cuda_clearCublasWorkspaces()
