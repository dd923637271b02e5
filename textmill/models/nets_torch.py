"""Torch nets of any family: built empty, filled from checkpoint names and layout, and read back the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from textmill.checkpoints.adapters import is_adapter, open_adapter, read_base_and_adapter, read_weights
from textmill.config import LoraConfig
from textmill.errors import TextmillError
from textmill.models import Shape, Weight, find_part, shape_in, to_checkpoint
from textmill.models.base_torch import BaseNet
from textmill.models.lora import lora_of, weights_with
from textmill.models.lora_torch import add_adapters
from textmill.models.memory_layout import in_memory, laid_out
from textmill.storage.tensor_files import Named


def build_net(shape: Shape, lora: LoraConfig | None = None) -> BaseNet:
    """The family's net as its modules build themselves: the caller's context decides where memory is allocated."""
    module = find_part(shape, "net_torch")
    if module is None:
        raise TextmillError(f"model.family: {shape.family} has no torch net; write models/{shape.family}/net_torch.py")
    net: BaseNet = module.Net(shape)
    if lora is not None:
        add_adapters(net, lora)
    return net


def new_net(
    shape: Shape,
    device: torch.device,
    lora: LoraConfig | None = None,
    shard: Callable[[BaseNet], None] | None = None,
) -> BaseNet:
    """The family's net, with adapters if requested; memory is allocated for what `shard` leaves of it, and has no values yet."""
    with torch.device("meta"):
        net = build_net(shape, lora)
        if shard is not None:
            shard(net)
    net._apply(lambda tensor: _memory(tensor, device))  # type: ignore[no-untyped-call]
    return net.eval()


def _memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for a tensor on the meta device; a plain one's shape is passed, since torch would import sympy to find it."""
    plain = type(tensor) in (Tensor, nn.Parameter)
    return (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if plain
        else torch.empty_like(tensor, device=device)
    )


def open_net(folder: Path, device: torch.device, *, separate: bool = False) -> BaseNet:
    """The net of a model folder, its weights in fp32; an adapter is merged into its base, or kept `separate` from it."""
    shape = shape_in(folder)
    if not is_adapter(folder):
        _check_size(shape, folder)
    adapter = open_adapter(folder) if separate and is_adapter(folder) else None
    net = new_net(shape, device, lora_of(adapter, shape) if adapter else None)
    fill(net, read_base_and_adapter(adapter) if adapter else read_weights(folder), str(folder))
    return net


def _check_size(shape: Shape, folder: Path) -> None:
    """Refuse a config.json for which more memory would be allocated than its weights can fill."""
    least, held = (
        (shape.layers * shape.width + shape.vocab) * shape.width,
        sum(path.stat().st_size for path in folder.glob("*.safetensors")),
    )
    if held and least > held:
        raise TextmillError(
            f"{folder}: config.json describes more than {least:,} weights, its files have {held:,} bytes; config.json and the weights disagree"
        )


def parameters_of(net: BaseNet) -> dict[str, tuple[Weight, nn.Parameter]]:
    """Each weight by its checkpoint name, with the parameter that has its values."""
    parameters = dict(net.named_parameters())
    return {weight.name: (weight, parameters[weight.parameter]) for weight in weights_with(net.shape, net.lora)}


def fill(
    net: BaseNet, named: Iterable[Named], where: str, put: Callable[[Weight, nn.Parameter, Tensor], Any] | None = None
) -> None:
    """Fill the net: every weight once, each of its own size. `put` writes one where a process has parts of weights."""
    known = parameters_of(net)
    with torch.no_grad():
        for weight, values in laid_out([weight for weight, _ in known.values()], net.shape, named, where):
            laid, parameter = torch.tensor(values), known[weight.name][1]
            put(weight, parameter, laid) if put else parameter.copy_(laid)


def moments_in(net: BaseNet, named: Iterable[Named], where: str) -> Iterator[tuple[str, Weight, nn.Parameter, Tensor]]:
    """Each moment's kind, the weight and the parameter that it belongs to, and its values in memory layout."""
    known = parameters_of(net)
    for name, values in named:
        kind, _, of = name.partition("/")
        weight, parameter = known[of]
        yield kind, weight, parameter, torch.tensor(in_memory(weight, values, where))


def named_copies(
    net: BaseNet, tensors: dict[nn.Parameter, Tensor], prefix: str = "", mine: Callable[[str], bool] = lambda _: True,
    gather: Callable[[Weight, nn.Parameter, Tensor], Tensor] = lambda _weight, _parameter, own: own,
) -> Iterator[Named]:  # fmt: skip
    """Host copies of the tensor of each parameter given, if it is `mine`, in checkpoint names and layout; `gather` joins shards."""
    for name, (weight, parameter) in parameters_of(net).items():
        if parameter not in tensors:
            continue
        tensor = gather(weight, parameter, tensors[parameter].detach())
        if not mine(prefix + name):
            continue
        yield prefix + name, host_copy(to_checkpoint(weight, tensor.float())).numpy()


def host_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy in host memory; a GPU transposes by itself and writes to pinned memory."""
    if not tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    try:
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:  # none left
        memory = torch.empty(tensor.shape, dtype=tensor.dtype)
    return memory.copy_(tensor.contiguous())
