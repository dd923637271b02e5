"""Torch nets of any family: made empty, filled from checkpoint names and layout, and read back the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from textmill.checkpoints.adapters import is_adapter, open_adapter, read_base_and_adapter, read_weights
from textmill.config import LoraConfig
from textmill.errors import TextmillError
from textmill.models import Family, Weight, open_family, shape_in
from textmill.models.blockwise_torch import PLAIN, Parts
from textmill.models.lora import lora_of, weights_with
from textmill.models.lora_torch import adapt
from textmill.models.memory_layout import in_memory, laid_out
from textmill.storage.tensor_files import Named


class Net(Protocol):
    """What a family's torch net offers besides being a module."""

    shape: Any
    recompute: int
    """Blocks at a time whose inner states are made again in backward; 0: none."""
    lora: LoraConfig | None
    """The adapters that stand beside its matrices."""
    fp8: bool
    """Whether training makes products in fp8 where that pays."""

    def use_fp8(self) -> None: ...
    @property
    def head(self) -> Tensor: ...
    def __call__(
        self,
        ids_NT: Tensor,
        keys_N: Tensor | None = None,
        cache: Any = None,
        documents_NT: Tensor | None = None,
        parts: Parts = PLAIN,
    ) -> Tensor: ...
    def logits(self, x_NTE: Tensor) -> Tensor: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


def _twin(shape: Any) -> Any:
    """The family's torch module: models/FAMILY/net_torch.py has Net and Cache."""
    return import_module(f"textmill.models.{shape.family}.net_torch")


def new_net(
    shape: Any, device: torch.device, lora: LoraConfig | None = None, place: Callable[[Any], None] | None = None
) -> Net:
    """The family's net, with adapters where they are asked for; memory is taken, for what `place` leaves of it, and nothing in it yet."""
    with torch.device("meta"):
        net: Any = net_of(shape, lora)
        if place is not None:
            place(net)
    return cast(Net, net._apply(lambda tensor: _memory(tensor, device)).eval())


def _memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Room for a tensor that has none yet; a plain one's shape is told, as to find it torch would import sympy."""
    plain = type(tensor) in (Tensor, nn.Parameter)
    return (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if plain
        else torch.empty_like(tensor, device=device)
    )


def open_net(folder: Path, device: torch.device, *, apart: bool = False) -> Net:
    """The net of a model folder, its weights in fp32; an adapter is merged into its base, or stands beside it if asked."""
    shape = shape_in(folder)
    if not is_adapter(folder):
        _check_size(shape, folder)
    adapter = open_adapter(folder) if apart and is_adapter(folder) else None
    net = new_net(shape, device, lora_of(adapter, shape) if adapter else None)
    fill(net, read_base_and_adapter(adapter) if adapter else read_weights(folder), str(folder))
    return net


def _check_size(shape: Any, folder: Path) -> None:
    """Refuse a config.json that would have more memory taken than its weights can fill."""
    least, held = (
        (shape.layers * shape.width + shape.vocab) * shape.width,
        sum(path.stat().st_size for path in folder.glob("*.safetensors")),
    )
    if held and least > held:
        raise TextmillError(
            f"{folder}: config.json describes more than {least:,} weights, its files hold {held:,} bytes; one of them lies"
        )


def new_cache(net: Net, samples: int, length: int) -> Any:
    """Room for the keys and values of so many samples and tokens, on the net's device and in its dtype."""
    _, parameter = next(net.named_parameters())
    return _twin(net.shape).Cache(net.shape, samples, length, parameter.device, parameter.dtype)


def family_of(net: Net) -> Family:
    """The facts of a net's family."""
    return open_family(net.shape.family)


def weights_of(net: Net) -> dict[str, tuple[Weight, nn.Parameter]]:
    """Each weight by its checkpoint name, with the parameter that holds it."""
    family, parameters = family_of(net), dict(net.named_parameters())
    return {
        weight.name: (weight, parameters[family.memory_name(weight.name)])
        for weight in weights_with(net.shape, net.lora)
    }


def fill(
    net: Net, named: Iterable[Named], where: str, put: Callable[[Weight, nn.Parameter, Tensor], Any] | None = None
) -> None:
    """Fill the net; every weight once, each of its own shape. `put` does it where a process holds parts of weights."""
    known = weights_of(net)
    with torch.no_grad():
        for weight, values in laid_out([weight for weight, _ in known.values()], net.shape, named, where):
            laid, parameter = torch.tensor(values), known[weight.name][1]
            put(weight, parameter, laid) if put else parameter.copy_(laid)


def moments_in(net: Net, named: Iterable[Named], where: str) -> Iterator[tuple[str, Weight, nn.Parameter, Tensor]]:
    """Each moment's kind, the weight and the parameter that it belongs to, and its values in the net's layout."""
    known = weights_of(net)
    for name, values in named:
        kind, _, of = name.partition("/")
        weight, parameter = known[of]
        yield kind, weight, parameter, torch.tensor(in_memory(net.shape, weight, values, where))


def named_copies(
    net: Net, tensors: dict[nn.Parameter, Tensor], prefix: str = "", mine: Callable[[str], bool] = lambda _: True,
    whole: Callable[[Weight, nn.Parameter, Tensor], Tensor] = lambda _weight, _parameter, own: own,
) -> Iterator[Named]:  # fmt: skip
    """Host copies of what belongs to each parameter given and is `mine`, in checkpoint names and layout; `whole` makes parts one."""
    family = family_of(net)
    for name, (weight, parameter) in weights_of(net).items():
        if parameter not in tensors:
            continue
        tensor = whole(weight, parameter, tensors[parameter].detach())
        if not mine(prefix + name):
            continue
        yield prefix + name, host_copy(family.to_checkpoint(weight, tensor.float(), net.shape)).numpy()


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory, one element after the other; a GPU turns what lies crosswise itself, and writes to pinned memory."""
    if not tensor.is_cuda:
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    try:
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:  # no more of it to be had
        memory = torch.empty(tensor.shape, dtype=tensor.dtype)
    return memory.copy_(tensor.contiguous())


def net_of(shape: Any, lora: LoraConfig | None = None) -> Net:
    """The family's net as its modules make themselves: its memory is taken where and how the caller's context says."""
    net = cast(Net, _twin(shape).Net(shape))
    if lora is not None:
        adapt(net, lora)
    return net
