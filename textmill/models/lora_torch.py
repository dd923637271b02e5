"""Adapters in a torch net: each chosen matrix stays, and two narrow ones beside it learn."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from textmill.config import LoraConfig
from textmill.kernels import matmul_torch as products
from textmill.kernels.dropout_torch import drop, site_in
from textmill.models import open_family
from textmill.models.lora import adapters_of, sites_of


class Adapted(nn.Linear):
    """A matrix with an adapter: x W + scale drop(x) A B."""

    def __init__(self, linear: nn.Linear, lora: LoraConfig, site: int) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.lora_A = nn.Linear(linear.in_features, lora.rank, bias=False)
        self.lora_B = nn.Linear(lora.rank, linear.out_features, bias=False)
        self.lora, self.site = lora, site

    def forward(self, x_NTE: Tensor, keys_N: Tensor | None = None) -> Tensor:
        return super().forward(x_NTE) + self.added(x_NTE, keys_N)

    def added(self, x_NTE: Tensor, keys_N: Tensor | None, columns: tuple[int, int] = (0, 1)) -> Tensor:
        """What the adapter adds; of x there may be only some columns, one of several equal parts."""
        seen_NTE = drop(x_NTE, self.lora.dropout, keys_N, self.site, columns=columns)
        out: Tensor = self.lora_B(self.lora_A(seen_NTE)) * (self.lora.alpha / self.lora.rank)
        return out


def through(linear: nn.Module, x_NTE: Tensor, keys_N: Tensor | None) -> Tensor:
    """x times a matrix of a net; `keys_N` are for an adapter's dropout, where there is one."""
    if type(linear) is nn.Linear and products.are_chosen(x_NTE, linear.weight):
        return products.linear(x_NTE, linear.weight, linear.bias)
    out: Tensor = linear(x_NTE, keys_N) if isinstance(linear, Adapted) else linear(x_NTE)
    return out


def adapt(net: Any, lora: LoraConfig) -> None:
    """Put adapters beside the matrices that the settings name; the net is still empty."""
    net.lora, short, sites = lora, open_family(net.shape.family).memory_name, sites_of(net.shape)
    for stem in dict.fromkeys(weight.name.rpartition(".lora_")[0] for weight in adapters_of(net.shape, lora)):
        parent, _, leaf = short(stem).rpartition(".")
        holder = cast(nn.Module, net).get_submodule(parent)
        site = site_in(int(parent.split(".")[1]), sites[stem])  # h.LAYER.attn, h.LAYER.mlp
        setattr(holder, leaf, Adapted(getattr(holder, leaf), lora, site))
