"""LoRA in a torch net: each target matrix stays frozen, and two low-rank matrices next to it are trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from textmill.config import LoraConfig
from textmill.kernels import matmul_torch as matmul
from textmill.kernels.dropout_torch import drop, site_in_block
from textmill.models.base_torch import BaseNet
from textmill.models.lora import dropout_sites, target_weights


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter: x W + scale dropout(x) A B."""

    def __init__(self, linear: nn.Linear, lora: LoraConfig, site: int) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.lora_A = nn.Linear(linear.in_features, lora.rank, bias=False)
        self.lora_B = nn.Linear(lora.rank, linear.out_features, bias=False)
        self.lora = lora
        self.site = site

    def forward(self, x_NTE: Tensor, keys_N: Tensor | None = None) -> Tensor:
        return super().forward(x_NTE) + self.adapter_output(x_NTE, keys_N)

    def adapter_output(self, x_NTE: Tensor, keys_N: Tensor | None, columns: tuple[int, int] = (0, 1)) -> Tensor:
        """What the adapter adds. If x has only some of the columns, `columns` is (number, count) of equal parts."""
        seen_NTE = drop(x_NTE, self.lora.dropout, keys_N, self.site, columns=columns)
        out: Tensor = self.lora_B(self.lora_A(seen_NTE)) * (self.lora.alpha / self.lora.rank)
        return out


def apply_linear(linear: nn.Module, x_NTE: Tensor, keys_N: Tensor | None) -> Tensor:
    """A linear layer of a net, with its adapter if it has one; `keys_N` are the dropout keys for the adapter."""
    if type(linear) is nn.Linear and matmul.use_tuned_matmul(x_NTE, linear.weight):
        return matmul.linear(x_NTE, linear.weight, linear.bias)
    out: Tensor = linear(x_NTE, keys_N) if isinstance(linear, AdaptedLinear) else linear(x_NTE)
    return out


def join_linears(layers: tuple[nn.Linear, ...], x_NTE: Tensor, keys_N: Tensor | None) -> tuple[Tensor, ...]:
    """The outputs of layers with one input; in compiled training on a GPU they are one matmul.

    Joining the matrices costs nothing there: it is part of their cast to the matmuls' precision.
    """
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    plain = all(type(layer) is nn.Linear for layer in layers) and len(biases) in (0, len(layers))
    if not plain or not matmul.use_tuned_matmul(x_NTE, layers[0].weight):
        return tuple(apply_linear(layer, x_NTE, keys_N) for layer in layers)
    bias_F = torch.cat(biases) if biases else None
    joined = matmul.linear(x_NTE, torch.cat([layer.weight for layer in layers]), bias_F)
    return torch.split(joined, [len(layer.weight) for layer in layers], -1)


def add_adapters(net: BaseNet, lora: LoraConfig) -> None:
    """Replace the target matrices by ones with adapters; call it before memory is allocated."""
    net.lora, sites = lora, dropout_sites(net.shape)
    for weight in target_weights(net.shape, lora):
        parent, _, leaf = weight.parameter.removesuffix(".weight").rpartition(".")
        holder = net.get_submodule(parent)
        site = site_in_block(net.shape.layers - weight.depth, sites[weight.stem])
        setattr(holder, leaf, AdaptedLinear(getattr(holder, leaf), lora, site))
