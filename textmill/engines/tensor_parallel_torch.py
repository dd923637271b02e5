"""Tensor-parallel peers: each holds whole heads, columns of the MLP and rows of the vocabulary, and they sum what each has.

Shapes in names: N samples, T tokens, E width, V rows of the vocabulary that a peer holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from textmill.models.lora_torch import Adapted

# Torch 2.13 has other names for these two, and warns of the old ones.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Pass = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Peers:
    """One group of peers. With `sequence` what lies between their sums is shared by tokens."""

    group: Any
    rank: int
    count: int
    sequence: bool

    def enter(self, x_NTE: Tensor) -> Tensor:
        """From the stream into what each peer has a part of: all tokens; in backward the peers' gradients are summed."""
        there, back = (self.gathered, self.scattered) if self.sequence else (_alike, self.summed)
        out: Tensor = _Joint.apply(x_NTE, there, back)  # type: ignore[no-untyped-call]
        return out

    def leave(self, x_NTE: Tensor) -> Tensor:
        """Back into the stream: the sum of all peers, of which each keeps its own tokens where they are shared."""
        there, back = (self.scattered, self.gathered) if self.sequence else (self.summed, _alike)
        out: Tensor = _Joint.apply(x_NTE, there, back)  # type: ignore[no-untyped-call]
        return out

    def summed(self, x: Tensor) -> Tensor:
        """The sum of all peers' values."""
        total = x.contiguous().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def gathered(self, x_NTE: Tensor) -> Tensor:
        """All peers' tokens, one peer's after the other's."""
        samples, tokens, width = x_NTE.shape
        parts = x_NTE.new_empty(self.count * samples, tokens, width)
        all_gather(parts, x_NTE.contiguous(), group=self.group)
        return parts.view(self.count, samples, tokens, width).movedim(0, 1).flatten(1, 2)

    def scattered(self, x_NTE: Tensor) -> Tensor:
        """This peer's tokens of the sum of all."""
        samples, tokens, width = x_NTE.shape
        parts = x_NTE.reshape(samples, self.count, tokens // self.count, width).movedim(1, 0).flatten(0, 1)
        own = torch.empty_like(parts[:samples])
        reduce_scatter(own, parts, group=self.group)
        return own


class _Joint(torch.autograd.Function):
    """One way there, another for gradients on their way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Pass, back: Pass) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(slope), None, None


def _alike(x: Tensor) -> Tensor:
    return x.view_as(x)


class RowLinear(nn.Linear):
    """A matrix whose inputs are shared out; its bias is added once, to the sum."""

    def __init__(self, linear: nn.Linear, peers: Peers) -> None:
        super().__init__(linear.in_features // peers.count, linear.out_features)
        self.peers = peers

    def forward(self, x: Tensor) -> Tensor:
        partial = F.linear(x, self.weight)
        return self.peers.leave(partial) + self.bias.to(partial.dtype)


class RowAdapted(Adapted):
    """The same with an adapter, whose inputs are shared out with the matrix'."""

    def __init__(self, whole: Adapted, peers: Peers) -> None:
        super().__init__(nn.Linear(whole.in_features // peers.count, whole.out_features), whole.lora, whole.site)
        self.peers = peers

    def forward(self, x: Tensor, keys_N: Tensor | None = None) -> Tensor:
        partial = F.linear(x, self.weight)
        partial = partial + self.added(x, keys_N, (self.peers.rank, self.peers.count))
        return self.peers.leave(partial) + self.bias.to(partial.dtype)


class Vocabulary(nn.Embedding):
    """Rows of an embedding: a token that another peer holds is nothing here, and comes with the sum."""

    def __init__(self, embedding: nn.Embedding, peers: Peers) -> None:
        rows = -(-embedding.num_embeddings // peers.count)
        super().__init__(rows, embedding.embedding_dim)
        self.peers, self.begin = peers, rows * peers.rank

    def forward(self, ids_NT: Tensor) -> Tensor:
        own_NT = ids_NT - self.begin
        here_NT = (own_NT >= 0) & (own_NT < self.num_embeddings)
        return self.peers.leave(super().forward(own_NT.where(here_NT, 0)) * here_NT[..., None])


class Positions(nn.Embedding):
    """Position vectors of this peer's tokens alone."""

    def __init__(self, embedding: nn.Embedding, peers: Peers) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim)
        self.peers = peers

    def forward(self, positions: Tensor) -> Tensor:
        return super().forward(positions.chunk(self.peers.count, -1)[self.peers.rank])


def share_out(net: Any, peers: Peers) -> None:
    """Put a peer's parts in the place of the net's own modules, while it is still empty."""

    def entered(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (peers.enter(given[0]), *given[1:])

    tokens = peers.rank if peers.sequence else 0
    net.part, net.wte = tokens, Vocabulary(net.wte, peers)
    if peers.sequence:
        net.wpe = Positions(net.wpe, peers)
    for block in net.h:
        block.part, block.attn.part = tokens, peers.rank
        for holder, column in ((block.attn, "c_attn"), (block.mlp, "c_fc")):
            whole, last = getattr(holder, column), holder.c_proj
            part = nn.Linear(whole.in_features, whole.out_features // peers.count)
            setattr(holder, column, Adapted(part, whole.lora, whole.site) if isinstance(whole, Adapted) else part)
            holder.c_proj = RowAdapted(last, peers) if isinstance(last, Adapted) else RowLinear(last, peers)
            holder.register_forward_pre_hook(entered)
    net.register_forward_hook(lambda _net, _given, x_NTE: peers.enter(x_NTE))
