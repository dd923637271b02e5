"""Adapters in a torch net: each chosen matrix stays, and two narrow ones beside it learn."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from textmill.config import LoraConfig
from textmill.models import open_family
from textmill.models.lora import adapters_of


class Adapted(nn.Linear):
    """A matrix with an adapter: x W + scale x A B."""

    def __init__(self, linear: nn.Linear, lora: LoraConfig) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.lora_A = nn.Linear(linear.in_features, lora.rank, bias=False)
        self.lora_B = nn.Linear(lora.rank, linear.out_features, bias=False)
        self.scale = lora.alpha / lora.rank

    def forward(self, x_NTE: Tensor) -> Tensor:
        out: Tensor = super().forward(x_NTE) + self.lora_B(self.lora_A(x_NTE)) * self.scale
        return out


def adapt(net: Any, lora: LoraConfig) -> None:
    """Put adapters beside the matrices that the settings name; the net is still empty."""
    net.lora, short = lora, open_family(net.shape.family).memory_name
    for stem in dict.fromkeys(short(weight.name).rpartition(".lora_")[0] for weight in adapters_of(net.shape, lora)):
        parent, _, leaf = stem.rpartition(".")
        holder = cast(nn.Module, net).get_submodule(parent)
        setattr(holder, leaf, Adapted(getattr(holder, leaf), lora))
