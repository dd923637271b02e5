"""Fast decoding of GPT-2 on a GPU: one kernel for everything between two matmuls.

Shapes in names: N texts, E width, H heads, D head width, F width of a matrix's output.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from textmill.models.decode_torch import CapturedSlots, has_no_adapter, usable
from textmill.models.gpt2.net_torch import MLP, Net
from textmill.models.layers_torch import Context, linear_and_activation

__all__ = ["FastSlots", "usable"]


class FastSlots(CapturedSlots):
    """GPT-2's captured slots."""

    net: Net

    def can_fuse(self) -> bool:
        """True without adapters, and with an activation that the kernels have."""
        blocks: list[Any] = list(self.net.blocks)
        return self.net.shape.activation in self.kernels.ACTIVATIONS and all(
            has_no_adapter((block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)) for block in blocks
        )

    def _hidden(self, count: int, *, few: bool) -> Tensor:
        """The last hidden states of a step: one kernel for everything between two matmuls.

        With few texts, kernel launches take most of the time; then one kernel does a matmul and everything around it,
        including norms.
        """
        net = self.net
        fused = self.kernels
        blocks: list[Any] = [*net.blocks, None]
        x_NE: Tensor = fused.embed(self.ids_N[:count], self.positions_N[:count], net.wte.weight, net.wpe.weight)
        h_NE = x_NE if few else blocks[0].ln_1(x_NE)
        for layer, (block, following) in enumerate(pairwise(blocks)):
            attn = block.attn
            mlp = block.mlp
            norm = following.ln_1 if following else net.ln_f
            qkv_NF = fused.fused_linear(x_NE, attn.c_attn, norm=block.ln_1) if few else attn.c_attn(h_NE)
            qkv_NH3D = qkv_NF.view(count, net.shape.heads, 3, -1)
            y_NE = fused.attend(qkv_NH3D, self.cache.memory[layer], self.positions_N[:count], self.arrivals)
            x_NE, h_NE = self._add_linear(x_NE, y_NE, attn.c_proj, block.ln_2, few=few)
            inner_NF = (
                fused.fused_linear(x_NE, mlp.c_fc, norm=block.ln_2, activation=net.shape.activation)
                if few
                else _activations(mlp, h_NE)
            )
            x_NE, h_NE = self._add_linear(x_NE, inner_NF, mlp.c_proj, norm, few=few)
        hidden_NE: Tensor = net.ln_f(x_NE) if few else h_NE
        return hidden_NE


def _activations(mlp: MLP, h_NE: Tensor) -> Tensor:
    """The activations between the MLP's matrices; cuBLAS adds GELU to the matmul where it can."""
    if mlp.activation != "gelu_new" or type(mlp.c_fc) is not nn.Linear:
        return linear_and_activation(h_NE, mlp.c_fc, mlp.activation, Context())
    return torch._addmm_activation(mlp.c_fc.bias, h_NE, mlp.c_fc.weight.T, use_gelu=True)
