"""LoRA in a torch net: each target matrix stays, and two narrow ones next to it are trained."""

from __future__ import annotations

from torch import Tensor, nn

from textmill.config import LoraConfig
from textmill.kernels import matmul_torch as matmul
from textmill.kernels.dropout_torch import drop, site_in
from textmill.models.base_torch import BaseNet
from textmill.models.lora import sites_of, target_weights


class Adapted(nn.Linear):
    """A matrix with an adapter: x W + scale drop(x) A B."""

    def __init__(self, linear: nn.Linear, lora: LoraConfig, site: int) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.lora_A = nn.Linear(linear.in_features, lora.rank, bias=False)
        self.lora_B = nn.Linear(lora.rank, linear.out_features, bias=False)
        self.lora, self.site = lora, site

    def forward(self, x_NTE: Tensor, keys_N: Tensor | None = None) -> Tensor:
        return super().forward(x_NTE) + self.added(x_NTE, keys_N)

    def added(self, x_NTE: Tensor, keys_N: Tensor | None, columns: tuple[int, int] = (0, 1)) -> Tensor:
        """What the adapter adds; x may be only some columns: `columns` is which of how many equal parts."""
        seen_NTE = drop(x_NTE, self.lora.dropout, keys_N, self.site, columns=columns)
        out: Tensor = self.lora_B(self.lora_A(seen_NTE)) * (self.lora.alpha / self.lora.rank)
        return out


def apply_linear(linear: nn.Module, x_NTE: Tensor, keys_N: Tensor | None) -> Tensor:
    """x times a matrix of a net, and its bias; `keys_N` are for the dropout of an adapter, where there is one."""
    if type(linear) is nn.Linear and matmul.are_chosen(x_NTE, linear.weight):
        return matmul.linear(x_NTE, linear.weight, linear.bias)
    out: Tensor = linear(x_NTE, keys_N) if isinstance(linear, Adapted) else linear(x_NTE)
    return out


def add_adapters(net: BaseNet, lora: LoraConfig) -> None:
    """Put adapters next to the target matrices; the net has no memory yet."""
    net.lora, sites = lora, sites_of(net.shape)
    for weight in target_weights(net.shape, lora):
        parent, _, leaf = weight.parameter.removesuffix(".weight").rpartition(".")
        holder = net.get_submodule(parent)
        site = site_in(net.shape.layers - weight.depth, sites[weight.stem])
        setattr(holder, leaf, Adapted(getattr(holder, leaf), lora, site))
