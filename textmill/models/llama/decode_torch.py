"""Fast decoding of Llama, Qwen2 and Qwen3 on a GPU: joined matmuls, and one kernel for everything between two.

Shapes in names: N texts, T positions, E width, D head width, F width of a matrix's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from textmill.models import decode_torch
from textmill.models.decode_torch import CapturedSlots, has_no_adapter
from textmill.models.layers_torch import ACTIVATIONS
from textmill.models.llama.net_torch import Net, RMSNorm, frequencies_of


def usable(net: Net) -> bool:
    """True if the kernels can run this net on its device; they add no embeddings to values or to the stream."""
    added = net.shape.value_embeddings or net.shape.embedding_residual
    return not added and decode_torch.usable(net)


class JoinedLinear:
    """Linear layers with one input as one matmul; their weights become views of the joined ones, so that none is in
    memory twice. Layers with adapters are computed one by one."""

    def __init__(self, layers: tuple[nn.Linear, ...]) -> None:
        plain = has_no_adapter(layers)
        self.layers = layers
        self.weight = join_rows([layer.weight for layer in layers]) if plain else None
        self.bias = join_rows([layer.bias for layer in layers]) if plain and layers[0].bias is not None else None

    def __call__(self, x_NE: Tensor) -> Tensor:
        if self.weight is None:
            return torch.cat([layer(x_NE) for layer in self.layers], -1)
        return F.linear(x_NE, self.weight, self.bias)


class FastSlots(CapturedSlots):
    """Captured slots of Llama."""

    net: Net

    def __init__(self, net: Net, slots: int, length: int) -> None:
        super().__init__(net, slots, length)
        blocks: list[Any] = list(net.blocks)
        attentions = [block.self_attn for block in blocks]
        mlps = [block.mlp for block in blocks]
        self.qkv = [JoinedLinear((attn.q_proj, attn.k_proj, attn.v_proj)) for attn in attentions]
        self.gate_up = [
            JoinedLinear((mlp.gate_proj, mlp.up_proj) if net.shape.gated else (mlp.up_proj,)) for mlp in mlps
        ]
        self.angles = rotary_table(net, length)

    def can_fuse(self) -> bool:
        """True without adapters, with an activation that the kernels have, and with rows that fit."""
        shape = self.net.shape
        blocks = list[Any](self.net.blocks)
        plain = all(joined.weight is not None for joined in (*self.qkv, *self.gate_up)) and all(
            has_no_adapter((block.self_attn.o_proj, block.mlp.down_proj)) for block in blocks
        )
        widest = max(shape.width, shape.inner, shape.heads * shape.head_width)
        return plain and shape.activation in self.kernels.ACTIVATIONS and widest <= self.kernels.MAX_FUSED_WIDTH

    def _hidden(self, count: int, *, few: bool) -> Tensor:
        """The last hidden states of a step: one kernel for everything between two matmuls.

        Attention's kernel also normalises and rotates queries and keys. With few texts, kernel launches take most of
        the time; then one kernel does a matmul and everything around it, including norms and the gate.
        """
        net = self.net
        fused = self.kernels
        positions_N = self.positions_N[:count]
        blocks: list[Any] = [*net.blocks, None]
        x_NE: Tensor = fused.embed(self.ids_N[:count], positions_N, net.embed_tokens.weight)
        h_NE = x_NE if few else blocks[0].input_layernorm(x_NE)
        for layer, (block, following) in enumerate(pairwise(blocks)):
            attn = block.self_attn
            mlp = block.mlp
            qkv = self.qkv[layer]
            gate_up = self.gate_up[layer]
            qkv_NF = fused.fused_linear(x_NE, qkv, norm=block.input_layernorm) if few else qkv(h_NE)
            qkv_NHD = qkv_NF.view(count, -1, net.shape.head_width)
            norms = (attn.q_norm, attn.k_norm) if net.shape.qk_norm else None
            y_NE = fused.attend(qkv_NHD, self.cache.memory[layer], positions_N, self.arrivals, self.angles, norms)
            x_NE, h_NE = self._add_linear(x_NE, y_NE, attn.o_proj, block.post_attention_layernorm, few=few)
            inner_NF = self._inner(x_NE, block.post_attention_layernorm, gate_up) if few else self._gate(gate_up(h_NE))
            norm = following.input_layernorm if following else net.norm
            x_NE, h_NE = self._add_linear(x_NE, inner_NF, mlp.down_proj, norm, few=few)
        hidden_NE: Tensor = net.norm(x_NE) if few else h_NE
        return hidden_NE

    def _inner(self, x_NE: Tensor, norm: RMSNorm, gate_up: JoinedLinear) -> Tensor:
        """The MLP's activations in one kernel."""
        settings = {"activation": self.net.shape.activation, "gated": self.net.shape.gated}
        inner_NF: Tensor = self.kernels.fused_linear(x_NE, gate_up, norm=norm, **settings)
        return inner_NF

    def _gate(self, both_NF: Tensor) -> Tensor:
        """The activated gate times the other half; all activated, if there is no gate."""
        if not self.net.shape.gated:
            return ACTIVATIONS[self.net.shape.activation](both_NF)
        if self.net.shape.activation not in self.kernels.ACTIVATIONS:
            gate_NF, up_NF = both_NF.chunk(2, -1)
            return ACTIVATIONS[self.net.shape.activation](gate_NF) * up_NF
        inner_NF: Tensor = self.kernels.multiply_gate(both_NF, self.net.shape.activation)
        return inner_NF


def join_rows(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor with the rows of all, which become views of it; nothing is copied if they are already."""
    first = tensors[0]
    rows = [len(tensor) for tensor in tensors]
    starts = list(accumulate((tensor.nbytes for tensor in tensors), initial=first.data_ptr()))
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(storages) == 1 and [tensor.data_ptr() for tensor in tensors] == starts[:-1]:
        return first.detach().as_strided((sum(rows), *first.shape[1:]), first.stride())
    with torch.inference_mode(False), torch.no_grad():
        joined = torch.cat([tensor.detach() for tensor in tensors])
        for tensor, part in zip(tensors, torch.split(joined, rows), strict=True):
            tensor.data = part
    return joined


def rotary_table(net: Net, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D / 2] of every position's angles."""
    frequencies_D, scale = frequencies_of(net.shape)
    frequencies = torch.tensor(frequencies_D.tolist(), dtype=torch.float32, device=net.head.device)
    angles_TD = torch.arange(length, device=frequencies.device)[:, None].float() * frequencies
    return angles_TD.cos() * scale, angles_TD.sin() * scale
