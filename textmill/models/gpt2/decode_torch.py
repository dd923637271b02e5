"""Fast decoding of GPT-2: one kernel for everything between two matmuls.

Shapes in names: N texts, E width, H heads, D head width, F width of a matrix's output.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from textmill.models.base_torch import Context, linear_and_activation
from textmill.models.decode_torch import CapturedSlots
from textmill.models.gpt2.net_torch import MLP, Net


class Layer(NamedTuple):
    """The parts of a block; `norm` is the one before its MLP."""

    c_attn: Any
    attn_proj: Any
    norm: Any
    c_fc: Any
    mlp_proj: Any
    mlp: MLP


class FastSlots(CapturedSlots):
    """GPT-2's slots."""

    net: Net

    def __init__(self, net: Net, slots: int, length: int, *, captured: bool = True) -> None:
        super().__init__(net, slots, length, captured=captured)
        blocks: list[Any] = list(net.blocks)
        self.layers = [
            Layer(
                self.read_layer(block.attn.c_attn),
                self.read_layer(block.attn.c_proj),
                self.read_layer(block.ln_2),
                self.read_layer(block.mlp.c_fc),
                self.read_layer(block.mlp.c_proj),
                block.mlp,
            )
            for block in blocks
        ]
        self.norms = [self.read_layer(norm) for norm in [*(block.ln_1 for block in blocks), net.ln_f]]
        """That before each block, and the last one."""
        self.embeddings = net.wte.weight, net.wpe.weight

    def can_fuse(self) -> bool:
        """True with an activation that the kernels have."""
        return self.net.shape.activation in self.kernels.ACTIVATIONS

    def _hidden(self, count: int, *, few: bool) -> Tensor:
        """The last hidden states of a step: one kernel for everything between two matmuls.

        With few texts, kernel launches take most of the time; then one kernel does a matmul and everything around it,
        including norms.
        """
        fused = self.kernels
        heads = self.net.shape.heads
        activation = self.net.shape.activation
        positions_N = self.positions_N[:count]
        x_NE: Tensor = fused.embed(self.ids_N[:count], positions_N, *self.embeddings)
        h_NE = x_NE if few else self.norms[0](x_NE)
        for number, (layer, (norm, next_norm)) in enumerate(zip(self.layers, pairwise(self.norms), strict=True)):
            qkv_NF = fused.fused_linear(x_NE, layer.c_attn, norm=norm) if few else layer.c_attn(h_NE)
            qkv_NH3D = qkv_NF.view(count, heads, 3, -1)
            y_NE = fused.attend(qkv_NH3D, self.cache_of(number), positions_N, self.arrivals)
            x_NE, h_NE = self._add_linear(x_NE, y_NE, layer.attn_proj, layer.norm, few=few)
            inner_NF = (
                fused.fused_linear(x_NE, layer.c_fc, norm=layer.norm, activation=activation)
                if few
                else _activations(layer.mlp, h_NE)
            )
            x_NE, h_NE = self._add_linear(x_NE, inner_NF, layer.mlp_proj, next_norm, few=few)
        last_NE: Tensor = self.norms[-1](x_NE) if few else h_NE
        return last_NE


def _activations(mlp: MLP, h_NE: Tensor) -> Tensor:
    """The activations between the MLP's matrices; cuBLAS adds GELU to the matmul where it can."""
    if mlp.activation != "gelu_new":
        return linear_and_activation(h_NE, mlp.c_fc, mlp.activation, Context())
    return torch._addmm_activation(mlp.c_fc.bias, h_NE, mlp.c_fc.weight.T, use_gelu=True)
