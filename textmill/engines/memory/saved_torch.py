"""Activations that backward needs of the net as it runs on a CPU: counted in a forward pass without memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from textmill.devices import autocast
from textmill.models import Shape
from textmill.models.nets_torch import build_net


def saved_bytes(shape: Shape, samples: int, length: int, precision: torch.dtype, recompute: int = 0) -> int:
    """Bytes of all tensors that autograd keeps in one forward pass, without those of the net itself."""
    # Imported here: it takes a second, and only plans for a CPU need it.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        net = build_net(shape)
        net.recompute = recompute
        parameters = {parameter.untyped_storage()._cdata for parameter in net.parameters()}
        saved: dict[int, Any] = {}

        def save(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters:
                saved[storage._cdata] = storage  # kept alive, so that no other tensor gets its address
            return tensor

        ids = torch.zeros(samples, length, dtype=torch.int32)
        keys = torch.zeros(samples, dtype=torch.int32) if shape.uses_dropout else None
        hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
        with hooks, autocast(torch.device("cpu"), precision):
            net(ids, keys)
        return sum(int(storage.nbytes()) for storage in saved.values())


def saved_per_sample(shape: Any, length: int, precision: torch.dtype, recompute: int) -> float:
    """Bytes of activations of one sample at the peak, from nets of one and two blocks: all blocks are alike."""
    one_block, two_blocks = (saved_bytes(replace(shape, layers=layers), 1, length, precision) for layers in (1, 2))
    block = two_blocks - one_block
    if not recompute:
        return float(one_block + block * (shape.layers - 1))
    one_group, two_groups = (saved_bytes(replace(shape, layers=layers), 1, length, precision, 1) for layers in (1, 2))
    groups = -(-shape.layers // recompute)
    return float(one_group + (two_groups - one_group) * (groups - 1) + block * min(recompute, shape.layers))
