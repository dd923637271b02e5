"""Adapters in a torch net: each chosen matrix stays, and two narrow ones beside it learn."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from textmill.config import LoraConfig
from textmill.models import open_family
from textmill.models.dropout_torch import drop
from textmill.models.lora import adapters_of, sites_of


class Adapted(nn.Linear):
    """A matrix with an adapter: x W + scale drop(x) A B."""

    def __init__(self, linear: nn.Linear, lora: LoraConfig, site: int) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.lora_A = nn.Linear(linear.in_features, lora.rank, bias=False)
        self.lora_B = nn.Linear(lora.rank, linear.out_features, bias=False)
        self.scale, self.share, self.site = lora.alpha / lora.rank, lora.dropout, site

    def forward(self, x_NTE: Tensor, keys_N: Tensor | None = None) -> Tensor:
        seen_NTE = drop(x_NTE, self.share, keys_N, self.site)
        out: Tensor = super().forward(x_NTE) + self.lora_B(self.lora_A(seen_NTE)) * self.scale
        return out


def through(linear: nn.Module, x_NTE: Tensor, keys_N: Tensor | None) -> Tensor:
    """x times a matrix of a net; `keys_N` are for an adapter's dropout, where there is one."""
    out: Tensor = linear(x_NTE, keys_N) if isinstance(linear, Adapted) else linear(x_NTE)
    return out


def adapt(net: Any, lora: LoraConfig) -> None:
    """Put adapters beside the matrices that the settings name; the net is still empty."""
    net.lora, short, sites = lora, open_family(net.shape.family).memory_name, sites_of(net.shape)
    for stem in dict.fromkeys(weight.name.rpartition(".lora_")[0] for weight in adapters_of(net.shape, lora)):
        parent, _, leaf = short(stem).rpartition(".")
        holder = cast(nn.Module, net).get_submodule(parent)
        setattr(holder, leaf, Adapted(getattr(holder, leaf), lora, sites[stem]))
