"""Cache: the keys and values of running texts, one slot for each text (KV cache).

Shapes in names: N texts, T new tokens, S tokens in the cache, H heads, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Cache:
    """Memory for the keys and values of a number of slots, allocated once.

    Call `read` or `extend` before a forward pass to choose what it adds."""

    def __init__(
        self,
        layers: int,
        heads: int,
        head_width: int,
        slots: int,
        length: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        # A token's key and value are neighbours, as most nets compute them. The extra slot is for padding rows.
        self.memory = torch.zeros(layers, slots + 1, length, heads, 2, head_width, device=device, dtype=dtype)
        self.rows: Tensor = torch.zeros(0, dtype=torch.long, device=device)
        self.positions_NT: Tensor | None = None
        """Positions of the new tokens; None: the pass reads contexts from their first token (prefill)."""
        self.mask_N1TS: Tensor | None = None
        self.longest = 0

    def read(self, slots_N: Tensor) -> None:
        """The next pass reads contexts from their first token into these slots."""
        self.rows = slots_N
        self.positions_NT = None
        self.mask_N1TS = None

    def extend(self, positions_NT: Tensor, longest: int) -> None:
        """The next pass adds tokens at these positions to the first slots; `longest` is their longest text then."""
        device = positions_NT.device
        self.rows = torch.arange(len(positions_NT), device=device)[:, None]
        self.positions_NT = positions_NT
        self.longest = longest
        self.mask_N1TS = (torch.arange(longest, device=device) <= positions_NT[..., None])[:, None]

    def attend(self, layer: int, q_NHTD: Tensor, k_NHTD: Tensor, v_NHTD: Tensor) -> Tensor:
        """Store a layer's new keys and values; return causal attention of the queries over their entire texts.

        There may be fewer key heads than query heads (grouped-query attention)."""
        keys, values = self.memory[layer].unbind(3)
        grouped = q_NHTD.shape[1] != k_NHTD.shape[1]
        if self.positions_NT is None:
            tokens = q_NHTD.shape[2]
            keys[self.rows, :tokens], values[self.rows, :tokens] = k_NHTD.transpose(1, 2), v_NHTD.transpose(1, 2)
            return F.scaled_dot_product_attention(q_NHTD, k_NHTD, v_NHTD, is_causal=True, enable_gqa=grouped)
        keys[self.rows, self.positions_NT] = k_NHTD.transpose(1, 2)
        values[self.rows, self.positions_NT] = v_NHTD.transpose(1, 2)
        k_NHSD, v_NHSD = (one[: len(self.rows), : self.longest].transpose(1, 2) for one in (keys, values))
        return F.scaled_dot_product_attention(q_NHTD, k_NHSD, v_NHSD, attn_mask=self.mask_N1TS, enable_gqa=grouped)

    def move(self, source: int, target: int, used: int) -> None:
        """Copy the first `used` tokens of one slot into another."""
        self.memory[:, target, :used] = self.memory[:, source, :used]

    def reorder(self, sources: Tensor, used: int) -> None:
        """Fill the first slots with the first `used` tokens of the slots `sources`, for beam search."""
        self.memory[:, : len(sources), :used] = self.memory[:, sources, :used]
