"""Attention masks: causal, and inside documents of a packed sample. Shapes in names: N samples, T tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

BLOCK = 128
"""Positions per block of a block mask."""
Mask = Tensor | BlockMask
"""Which tokens each token attends to: [N, 1, T, T], or a block mask of that."""


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Each token attends to itself and to those before it: [T, T]."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril(0)


def document_mask(documents_NT: Tensor) -> Tensor:
    """Which tokens each one attends to when attention stays inside its document: [N, 1, T, T]."""
    same_NTT = documents_NT[:, :, None] == documents_NT[:, None, :]
    return (same_NTT & causal_mask(same_NTT.shape[1], same_NTT.device))[:, None]


def two_way_mask(documents_NT: Tensor) -> Tensor:
    """Each token attends to every token of its document, before and after it: [N, 1, T, T]."""
    return (documents_NT[:, :, None] == documents_NT[:, None, :])[:, None]


def document_block_mask(documents_NT: Tensor) -> BlockMask:
    """document_mask as a block mask: attention skips blocks that are fully masked."""
    N, T = documents_NT.shape

    def attends(n: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents_NT[n, query] == documents_NT[n, key])

    return create_block_mask(attends, N, None, T, T, device=documents_NT.device)


def two_way_block_mask(documents_NT: Tensor) -> BlockMask:
    """two_way_mask as a block mask."""
    N, T = documents_NT.shape

    def attends(n: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return documents_NT[n, query] == documents_NT[n, key]

    return create_block_mask(attends, N, None, T, T, device=documents_NT.device)


def use_block_mask(documents_NT: Tensor, head_width: int) -> bool:
    """True if a block mask is faster: in a net compiled for a GPU, with shapes that fill the blocks."""
    fills = documents_NT.shape[1] % BLOCK == 0 and head_width in (16, 32, 64, 128, 256)
    return documents_NT.is_cuda and torch.compiler.is_compiling() and fills


def token_positions(ids_NT: Tensor, positions_NT: Tensor | None, documents_NT: Tensor | None) -> Tensor:
    """The position of each token, [T] or [N, T]: those given, else 0, 1, 2 ...; from 0 in every document, if given."""
    positions = torch.arange(0, ids_NT.shape[1], device=ids_NT.device) if positions_NT is None else positions_NT
    return positions if documents_NT is None else positions - document_starts(documents_NT)


def document_starts(documents_NT: Tensor) -> Tensor:
    """The position at which each token's document starts."""
    positions_T = torch.arange(documents_NT.shape[1], device=documents_NT.device)
    new_NT = F.pad(documents_NT[:, 1:] != documents_NT[:, :-1], (1, 0), value=False)
    return torch.where(new_NT, positions_T, 0).cummax(1).values
