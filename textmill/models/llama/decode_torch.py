"""Fast decoding of Llama, Qwen2 and Qwen3 with joined matmuls, and one kernel for everything between two.

Shapes in names: N texts, T positions, E width, D head width, F width of a matrix's output.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from textmill.models.base_torch import ACTIVATIONS
from textmill.models.decode_torch import CapturedSlots, join_rows
from textmill.models.llama.net_torch import Net, frequencies_of


class JoinedLinear:
    """Linear layers with one input as one matmul; their weights become views of the joined ones, so that none is in
    memory twice."""

    def __init__(self, layers: tuple[nn.Linear, ...], *, transposed: bool) -> None:
        self.weight = join_rows([layer.weight for layer in layers], transposed=transposed)
        self.bias = join_rows([layer.bias for layer in layers]) if layers[0].bias is not None else None

    def __call__(self, x_NE: Tensor) -> Tensor:
        return F.linear(x_NE, self.weight, self.bias)


class Layer(NamedTuple):
    """The parts of a block that are not joined; `norm` is the one before its MLP."""

    o_proj: Any
    norm: Any
    down_proj: Any
    head_norms: tuple[Any, Any] | None
    """Of queries and keys."""


class FastSlots(CapturedSlots):
    """Llama's slots."""

    net: Net

    def __init__(self, net: Net, slots: int, length: int, *, captured: bool = True) -> None:
        super().__init__(net, slots, length, captured=captured)
        blocks: list[Any] = list(net.blocks)
        attentions = [block.self_attn for block in blocks]
        mlps = [block.mlp for block in blocks]
        joined = partial(JoinedLinear, transposed=not captured)
        self.qkv = [joined((attn.q_proj, attn.k_proj, attn.v_proj)) for attn in attentions]
        self.gate_up = [joined((mlp.gate_proj, mlp.up_proj)) for mlp in mlps]
        self.angles = rotary_table(net, length)
        self.layers = [
            Layer(
                self.read_layer(attn.o_proj),
                self.read_layer(block.post_attention_layernorm),
                self.read_layer(mlp.down_proj),
                (self.read_layer(attn.q_norm), self.read_layer(attn.k_norm)) if net.shape.qk_norm else None,
            )
            for block, attn, mlp in zip(blocks, attentions, mlps, strict=True)
        ]
        self.norms = [self.read_layer(norm) for norm in [*(block.input_layernorm for block in blocks), net.norm]]
        """That before each block, and the last one."""
        self.tokens = net.embed_tokens.weight

    def can_fuse(self) -> bool:
        """True with an activation that the kernels have, and with rows that fit."""
        shape = self.net.shape
        widest = max(shape.width, shape.inner, shape.heads * shape.head_width)
        return shape.activation in self.kernels.ACTIVATIONS and widest <= self.kernels.MAX_FUSED_WIDTH

    def _hidden(self, count: int, *, few: bool) -> Tensor:
        """The last hidden states of a step: one kernel for everything between two matmuls.

        Attention's kernel also normalises and rotates queries and keys. With few texts, kernel launches take most of
        the time; then one kernel does a matmul and everything around it, including norms and the gate.
        """
        fused = self.kernels
        head_width = self.net.shape.head_width
        positions_N = self.positions_N[:count]
        x_NE: Tensor = fused.embed(self.ids_N[:count], positions_N, self.tokens)
        h_NE = x_NE if few else self.norms[0](x_NE)
        for number, (layer, (norm, next_norm)) in enumerate(zip(self.layers, pairwise(self.norms), strict=True)):
            qkv = self.qkv[number]
            gate_up = self.gate_up[number]
            qkv_NF = fused.fused_linear(x_NE, qkv, norm=norm) if few else qkv(h_NE)
            qkv_NHD = qkv_NF.view(count, -1, head_width)
            cache = self.cache_of(number)
            y_NE = fused.attend(qkv_NHD, cache, positions_N, self.arrivals, self.angles, layer.head_norms)
            x_NE, h_NE = self._add_linear(x_NE, y_NE, layer.o_proj, layer.norm, few=few)
            inner_NF = self._inner(x_NE, layer.norm, gate_up) if few else self._gate(gate_up(h_NE))
            x_NE, h_NE = self._add_linear(x_NE, inner_NF, layer.down_proj, next_norm, few=few)
        last_NE: Tensor = self.norms[-1](x_NE) if few else h_NE
        return last_NE

    def _inner(self, x_NE: Tensor, norm: Any, gate_up: JoinedLinear) -> Tensor:
        """The MLP's activations in one kernel."""
        activation = self.net.shape.activation
        inner_NF: Tensor = self.kernels.fused_linear(x_NE, gate_up, norm=norm, activation=activation, gated=True)
        return inner_NF

    def _gate(self, both_NF: Tensor) -> Tensor:
        """The activated gate times the other half."""
        if self.net.shape.activation not in self.kernels.ACTIVATIONS:
            gate_NF, up_NF = both_NF.chunk(2, -1)
            return ACTIVATIONS[self.net.shape.activation](gate_NF) * up_NF
        inner_NF: Tensor = self.kernels.multiply_gate(both_NF, self.net.shape.activation)
        return inner_NF


def rotary_table(net: Net, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D / 2] of every position's angles."""
    frequencies_D, scale = frequencies_of(net.shape)
    frequencies = torch.tensor(frequencies_D.tolist(), dtype=torch.float32, device=net.head.device)
    angles_TD = torch.arange(length, device=frequencies.device)[:, None].float() * frequencies
    return angles_TD.cos() * scale, angles_TD.sin() * scale
