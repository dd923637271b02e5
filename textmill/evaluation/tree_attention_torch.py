"""Attention inside packed trees: any net that can generate with a KV cache can also score packed rows.

Shapes in names: N rows, T tokens, H heads, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from textmill.evaluation.packing import CONTEXT, Rows
from textmill.kernels.transfer_torch import copy_to_device
from textmill.models.cache_torch import Cache


class TreeAttention(Cache):
    """Takes the place of the KV cache: it holds nothing, and lets a continuation attend to its context and itself."""

    def __init__(self, rows: Rows, device: torch.device) -> None:
        self.positions_NT = copy_to_device(rows.positions_NT, device)
        trees_NT, branches_NT = (copy_to_device(array, device) for array in (rows.trees_NT, rows.branches_NT))
        same_tree = trees_NT[:, :, None] == trees_NT[:, None, :]
        readable = (branches_NT[:, None, :] == CONTEXT) | (branches_NT[:, :, None] == branches_NT[:, None, :])
        self.mask_N1TT = (same_tree & readable).tril()[:, None]

    def attend(self, layer: int, q_NHTD: Tensor, k_NHTD: Tensor, v_NHTD: Tensor) -> Tensor:
        """Attention of a layer; there may be fewer key heads than query heads (grouped-query attention)."""
        grouped = q_NHTD.shape[1] != k_NHTD.shape[1]
        return F.scaled_dot_product_attention(q_NHTD, k_NHTD, v_NHTD, attn_mask=self.mask_N1TT, enable_gqa=grouped)
