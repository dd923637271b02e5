"""Where ZeRO keeps the fp32 masters and Adam's state, and how they are read and written by parameter.

DeepSpeed's own accessors know nothing without ZeRO or before the first step, and never reach Adam's count; so the base optimizer's
state is read and seeded directly. A process holds a piece of some parameters; a whole one is gathered at a time, never the net.
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
class Piece:
    """A part of a parameter: `count` numbers from `first` on, which stand in `flat` from `start` on."""

    flat: Tensor
    start: int
    count: int
    first: int
    group: int


class Masters:
    """Masters and moments under one stage of ZeRO; `zero` is DeepSpeed's optimizer around Adam, the same object as Adam without ZeRO."""

    def __init__(self, zero: Any, adam: torch.optim.AdamW, stage: int, device: torch.device) -> None:
        self.zero, self.adam, self.stage, self.device = zero, adam, stage, device

    def read(self, parameter: nn.Parameter, kind: str | None = None) -> Tensor:
        """A trained parameter's master, or a moment of it, whole and in fp32; every process calls this together."""
        whole = torch.zeros(_count(parameter), device=self.device)
        if (piece := self._piece(parameter)) is not None:
            with self._at_hand(piece.group):
                whole[piece.first : piece.first + piece.count] = self._values(piece, kind)
        if self.stage and dist.get_world_size() > 1:  # each number stands on one process, and zero on all others
            dist.all_reduce(whole)
        return whole.view(_shape(parameter))

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, values: Tensor, kind: str | None = None) -> None:
        """Take this process's piece of a master, a moment or a frozen weight; `publish` follows when all of them are written."""
        if (piece := self._piece(parameter)) is not None:
            with self._at_hand(piece.group, changed=True):
                self._values(piece, kind).copy_(values.flatten()[piece.first : piece.first + piece.count])

    @torch.no_grad()
    def seed(self, updates: int) -> None:
        """Adam's state after so many updates, its moments still zero; without any, none, as before the first."""
        for group, flat in self._flats():
            with self._at_hand(group, changed=True):
                self.adam.state.pop(flat, None)
                if updates:
                    moments = {key: torch.zeros_like(flat) for key in MOMENTS.values()}
                    self.adam.state[flat] = {"step": torch.tensor(float(updates), device=flat.device), **moments}
        if self.stage in (1, 2):
            self.zero._hp_optimizer_states_linked = False

    @torch.no_grad()
    def publish(self) -> None:
        """The net's own weights become those of the masters, on every process."""
        if self.stage in (1, 2):
            self.zero.update_lp_params()
        if self.stage == 3:
            for group, _ in self._flats():
                with self._at_hand(group):
                    self.zero._reassign_or_swap_out_partitioned_parameters(group)
            if kept := self.zero.persistent_parameters:
                kept[0].partition(kept)
                kept[0].all_gather(kept)

    def count(self) -> int:
        """Adam's own count of updates."""
        state = next(iter(self.adam.state.values()), None)
        return int(state["step"]) if state else 0

    def _values(self, piece: Piece, kind: str | None) -> Tensor:
        tensor = piece.flat if kind is None else self.adam.state[piece.flat][MOMENTS[kind]]
        return tensor.detach().view(-1)[piece.start : piece.start + piece.count]

    def _piece(self, parameter: nn.Parameter) -> Piece | None:
        if self.stage == 3 and not parameter.requires_grad:
            own: Any = parameter.ds_tensor  # type: ignore[attr-defined]
            first = own.ds_numel * dist.get_rank()
            count = min(own.ds_numel, _count(parameter) - first)
            return Piece(own, 0, count, first, 0) if count > 0 else None
        if self.stage == 0 or not parameter.requires_grad:
            return Piece(parameter, 0, parameter.numel(), 0, 0)
        if self.stage == 3:
            group, start, room = self.zero.grad_position[self.zero.get_param_id(parameter)]
            first = room * dist.get_rank()
            count = min(room, _count(parameter) - first)  # the last pieces are filled up
            return (
                Piece(self.zero.fp32_partitioned_groups_flat[group], start, count, first, group) if count > 0 else None
            )
        part: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if part is None:
            return None
        flat, at, of = (
            self.zero.single_partition_of_fp32_groups[part.param_group_index],
            part.hp_fragment_address,
            part.lp_fragment_address,
        )
        return Piece(flat, at.start, at.numel, of.start, part.param_group_index)

    def _flats(self) -> list[tuple[int, Tensor]]:
        """All that Adam holds here, by DeepSpeed's number."""
        if self.stage == 3:
            return list(enumerate(self.zero.fp32_partitioned_groups_flat))
        return [(number, flat) for number, group in enumerate(self.adam.param_groups) for flat in group["params"]]

    @contextmanager
    def _at_hand(self, group: int, changed: bool = False) -> Iterator[None]:
        """Around the use of a group that may lie on a disk."""
        if self.stage != 3 or not self.zero._swappable_optimizer_subgroup(group):
            yield
            return
        self.zero._optimizer_states_and_gradient_swap_in(group)
        yield
        if changed:
            self.zero._optimizer_states_and_gradient_swap_out(group)
        else:
            self.zero._release_swap_buffers(group)


def _count(parameter: nn.Parameter) -> int:
    """Numbers of the whole parameter, of which ZeRO-3 leaves none in its place."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _shape(parameter: nn.Parameter) -> torch.Size:
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape
