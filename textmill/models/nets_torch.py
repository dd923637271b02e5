"""Torch nets of any family: built empty, filled from checkpoint names and layout, and read back the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from textmill.checkpoints.adapters import read_weights
from textmill.config import LoraConfig
from textmill.errors import TextmillError
from textmill.kernels.dropout_torch import site_in_block
from textmill.models import (
    Shape,
    Weight,
    find_family_module,
    lay_out_weight,
    lay_out_weights,
    read_shape,
    to_checkpoint,
)
from textmill.models.base_torch import AdaptedLinear, BaseNet
from textmill.models.lora import dropout_sites, target_weights, weights_with_adapters
from textmill.storage.tensor_files import Named

LOCAL = "local"
"""What the kinds of optimizer state begin with that only runs with `engine.sync_every` read."""


def build_net(shape: Shape, lora: LoraConfig | None = None) -> BaseNet:
    """Build the family's net; the caller's context (such as the meta device) decides where memory is allocated."""
    module = find_family_module(shape, "net_torch")
    if module is None:
        raise TextmillError(f"model.family: {shape.family} has no torch net; write models/{shape.family}/net_torch.py")
    net: BaseNet = module.Net(shape)
    if lora is not None:
        add_adapters(net, lora)
    return net


def add_adapters(net: BaseNet, lora: LoraConfig) -> None:
    """Replace the target matrices by ones with LoRA adapters; call it before memory is allocated."""
    net.lora = lora
    sites = dropout_sites(net.shape)
    for weight in target_weights(net.shape, lora):
        parent, _, leaf = weight.parameter.removesuffix(".weight").rpartition(".")
        holder = net.get_submodule(parent)
        site = site_in_block(net.shape.layers - weight.depth, sites[weight.stem])
        setattr(holder, leaf, AdaptedLinear(getattr(holder, leaf), lora, site))


def new_net(
    shape: Shape, device: torch.device, lora: LoraConfig | None = None, shard: Callable[[BaseNet], None] | None = None
) -> BaseNet:
    """The family's net without values, with adapters if requested; `shard` divides it before memory is allocated."""
    with torch.device("meta"):
        net = build_net(shape, lora)
        if shard is not None:
            shard(net)
    absent = {id(net.get_parameter(name)) for name in net.absent}
    net._apply(lambda tensor: tensor if id(tensor) in absent else _memory(tensor, device))  # type: ignore[no-untyped-call]
    return net.eval()


def _memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for a meta tensor. A plain one's shape is passed explicitly: otherwise torch would import sympy."""
    if type(tensor) in (Tensor, nn.Parameter):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_like(tensor, device=device)


def open_net(folder: Path, device: torch.device) -> BaseNet:
    """The net of a model folder with fp32 weights; an adapter is merged into its base."""
    net = new_net(read_shape(folder), device)
    fill(net, read_weights(folder), str(folder))
    check_finite_weights(net, str(folder))
    return net


def check_finite_weights(net: BaseNet, where: str) -> None:
    """Refuse a net with weights that are NaN or infinite. Its outputs do not always tell: torch's attention on a CPU
    gives 0 for a short text whose scores are NaN."""
    for name, (_, parameter) in parameters_of(net).items():
        if not bool(parameter.isfinite().all()):
            raise TextmillError(
                f"{where}: its weight '{name}' has values that are not finite; it is damaged, or training diverged; "
                "use an earlier --step"
            )


def parameters_of(net: BaseNet) -> dict[str, tuple[Weight, nn.Parameter]]:
    """Each weight and its torch parameter, by checkpoint name."""
    parameters = dict(net.named_parameters())
    return {
        weight.name: (weight, parameters[weight.parameter]) for weight in weights_with_adapters(net.shape, net.lora)
    }


def own_parameters_of(net: BaseNet) -> list[tuple[Weight, nn.Parameter]]:
    """Each weight that this process has, with its parameter: all, or those of its pipeline stage."""
    return [member for member in parameters_of(net).values() if member[0].parameter not in net.absent]


def fill(
    net: BaseNet, named: Iterable[Named], where: str, put: Callable[[Weight, nn.Parameter, Tensor], Any] | None = None
) -> None:
    """Fill the net with all weights that it has here; `put` writes one of which this process has only a part."""
    parameters = parameters_of(net)
    weights = [weight for weight, _ in parameters.values()]
    with torch.no_grad():
        for weight, values in lay_out_weights(weights, net.shape, named, where):
            if weight.parameter in net.absent:
                continue
            tensor, (_, parameter) = torch.tensor(values), parameters[weight.name]
            if put:
                put(weight, parameter, tensor)
            else:
                parameter.copy_(tensor)


def match_optimizer_state(
    net: BaseNet,
    named: Iterable[Named],
    where: str,
    is_like_weight: Callable[[str, Weight, nn.Parameter], bool] = lambda _kind, _weight, _parameter: True,
    *,
    local: bool = False,
) -> Iterator[tuple[str, Weight, nn.Parameter, Tensor]]:
    """For each tensor of optimizer state: its kind, its weight and parameter, and its values in memory layout; state of
    another shape than the weight's is stored in that layout. `local` includes the state of local SGD."""
    parameters = parameters_of(net)
    for name, values in named:
        kind, _, weight_name = name.partition("/")
        if kind.startswith(LOCAL) and not local:
            continue
        weight, parameter = parameters[weight_name]
        if weight.parameter in net.absent:
            continue
        is_like = is_like_weight(kind, weight, parameter)
        yield kind, weight, parameter, torch.tensor(lay_out_weight(weight, values, where) if is_like else values)


def checkpoint_tensors(
    net: BaseNet,
    tensors: dict[nn.Parameter, Tensor],
    prefix: str = "",
    wanted: Callable[[str], bool] = lambda _: True,
    gather: Callable[[Weight, nn.Parameter, Tensor], Tensor] = lambda _weight, _parameter, own: own,
    is_like_weight: Callable[[Weight, nn.Parameter], bool] = lambda _weight, _parameter: True,
) -> Iterator[Named]:
    """Host copies of the wanted parameters' tensors, in checkpoint names and layout; `gather` joins shards. Tensors of
    another shape than the weight's are copied as they are."""
    for name, (weight, parameter) in parameters_of(net).items():
        if parameter not in tensors:
            continue
        tensor = tensors[parameter].detach()
        is_like = is_like_weight(weight, parameter)
        if is_like:
            tensor = gather(weight, parameter, tensor)
        if not wanted(prefix + name):
            continue
        yield prefix + name, host_copy(to_checkpoint(weight, tensor.float()) if is_like else tensor).numpy()


def host_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy in host memory; a GPU tensor is made contiguous on the GPU and copied to pinned memory."""
    if not tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    try:
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:  # no pinned memory left
        memory = torch.empty(tensor.shape, dtype=tensor.dtype)
    return memory.copy_(tensor.contiguous())
