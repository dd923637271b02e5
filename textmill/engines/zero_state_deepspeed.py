"""Read and write the fp32 master weights and Adam's state under each ZeRO stage, by parameter.

DeepSpeed's own accessors fail without ZeRO or before the first step, and cannot set Adam's step count; so this module
uses the wrapped optimizer's state directly. A rank holds fragments of some parameters; full tensors are gathered one
at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from textmill.engines.optimizers.adam_torch import MOMENTS


@dataclass(frozen=True)
class Fragment:
    """This rank's part of a parameter: elements `first` to `first + count`, stored in `flat` from `start` on."""

    flat: Tensor
    start: int
    count: int
    first: int
    group: int


class MasterWeights:
    """Master weights and moments under one ZeRO stage; `zero` is DeepSpeed's optimizer, or Adam itself at stage 0."""

    def __init__(self, zero: Any, adam: torch.optim.AdamW, stage: int, device: torch.device) -> None:
        self.zero = zero
        self.adam = adam
        self.stage = stage
        self.device = device

    def read(self, parameter: nn.Parameter, kind: str | None = None) -> Tensor:
        """A trained parameter's full master weight, or a moment of it, in fp32; all ranks call it together."""
        full = torch.zeros(_count_elements(parameter), device=self.device)
        if (fragment := self._find_fragment(parameter)) is not None:
            with self._swapped_in(fragment.group):
                full[fragment.first : fragment.first + fragment.count] = self._values(fragment, kind)
        if self.stage and dist.get_world_size() > 1:  # each element is on one rank, and zero on all others
            dist.all_reduce(full)
        return full.view(_full_shape(parameter))

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, values: Tensor, kind: str | None = None) -> None:
        """Store this rank's fragment of a master weight, a moment or a frozen weight; then call `update_net` once."""
        if (fragment := self._find_fragment(parameter)) is not None:
            with self._swapped_in(fragment.group, changed=True):
                own = values.flatten()[fragment.first : fragment.first + fragment.count]
                self._values(fragment, kind).copy_(own)

    @torch.no_grad()
    def reset_moments(self, updates: int) -> None:
        """Set Adam's step count to `updates` and its moments to zero; for 0 updates, remove its state."""
        for group, flat in self._flat_groups():
            with self._swapped_in(group, changed=True):
                self.adam.state.pop(flat, None)
                if updates:
                    moments = {key: torch.zeros_like(flat) for key in MOMENTS.values()}
                    self.adam.state[flat] = {"step": torch.tensor(float(updates), device=flat.device), **moments}
        if self.stage in (1, 2):
            self.zero._hp_optimizer_states_linked = False

    @torch.no_grad()
    def update_net(self) -> None:
        """Copy the master weights into the net's own weights, on every rank."""
        if self.stage in (1, 2):
            self.zero.update_lp_params()
        if self.stage == 3:
            for group, _ in self._flat_groups():
                with self._swapped_in(group):
                    self.zero._reassign_or_swap_out_partitioned_parameters(group)
            if persistent := self.zero.persistent_parameters:
                persistent[0].partition(persistent)
                persistent[0].all_gather(persistent)

    def count_updates(self) -> int:
        """Adam's step count."""
        state = next(iter(self.adam.state.values()), None)
        return int(state["step"]) if state else 0

    def _values(self, fragment: Fragment, kind: str | None) -> Tensor:
        tensor = fragment.flat if kind is None else self.adam.state[fragment.flat][MOMENTS[kind]]
        return tensor.detach().view(-1)[fragment.start : fragment.start + fragment.count]

    def _find_fragment(self, parameter: nn.Parameter) -> Fragment | None:
        """This rank's fragment of a parameter; None if other ranks have all of it."""
        if self.stage == 3 and not parameter.requires_grad:
            own: Any = parameter.ds_tensor  # type: ignore[attr-defined]
            first = own.ds_numel * dist.get_rank()
            count = min(own.ds_numel, _count_elements(parameter) - first)
            return Fragment(own, 0, count, first, 0) if count > 0 else None
        if self.stage == 0 or not parameter.requires_grad:
            return Fragment(parameter, 0, parameter.numel(), 0, 0)
        if self.stage == 3:
            group, start, size = self.zero.grad_position[self.zero.get_param_id(parameter)]
            first = size * dist.get_rank()
            count = min(size, _count_elements(parameter) - first)  # the last partitions are padded
            flat = self.zero.fp32_partitioned_groups_flat[group]
            return Fragment(flat, start, count, first, group) if count > 0 else None
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        group = mapping.param_group_index
        stored = mapping.hp_fragment_address
        own = mapping.lp_fragment_address
        flat = self.zero.single_partition_of_fp32_groups[group]
        return Fragment(flat, stored.start, stored.numel, own.start, group)

    def _flat_groups(self) -> list[tuple[int, Tensor]]:
        """The flat tensors that Adam updates on this rank, with DeepSpeed's group numbers."""
        if self.stage == 3:
            return list(enumerate(self.zero.fp32_partitioned_groups_flat))
        return [(number, flat) for number, group in enumerate(self.adam.param_groups) for flat in group["params"]]

    @contextmanager
    def _swapped_in(self, group: int, changed: bool = False) -> Iterator[None]:
        """Load a group that is offloaded to NVMe for the time of its use; write it back if it changed."""
        if self.stage != 3 or not self.zero._swappable_optimizer_subgroup(group):
            yield
            return
        self.zero._optimizer_states_and_gradient_swap_in(group)
        yield
        if changed:
            self.zero._optimizer_states_and_gradient_swap_out(group)
        else:
            self.zero._release_swap_buffers(group)


def _count_elements(parameter: nn.Parameter) -> int:
    """Elements of the full parameter; ZeRO-3 leaves an empty tensor in its place."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _full_shape(parameter: nn.Parameter) -> torch.Size:
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape
