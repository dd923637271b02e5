"""Teachers in torch: frozen nets whose predictions and hidden states are targets of training.

Shapes in names: M tokens, E width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from textmill.config import TrainConfig
from textmill.devices import autocast
from textmill.engines.distillation.loss_torch import Prediction
from textmill.engines.distillation.teachers import check_teacher, matched_layers, teacher_folder
from textmill.engines.micro_batches import MicroBatch
from textmill.models import Shape
from textmill.models.base_torch import BaseNet, CompiledParts
from textmill.models.nets_torch import open_net


class Targets(NamedTuple):
    """What the teachers computed for a micro-batch's labelled tokens."""

    predictions: list[Prediction]
    states: list[Tensor]
    """The last hidden states of each teacher, [M, E]."""
    hidden: list[list[Tensor]]
    """The hidden states of each teacher after the blocks of `train.distil.teacher_layers`, [M, E] each."""


class Teachers:
    """The teachers of a run on one device."""

    def __init__(self, train: TrainConfig, shape: Shape, device: torch.device, precision: torch.dtype) -> None:
        self.distil = train.distil
        self.precision = precision
        self.nets = [open_net(teacher_folder(name), device) for name in train.distil.teachers]
        for name, net in zip(train.distil.teachers, self.nets, strict=True):
            net.requires_grad_(False)
            check_teacher(name, net.shape, shape, train)
        layers = [len(net.blocks) for net in self.nets]
        self.layers = [matched_layers(self.distil, shape.layers, count)[1] for count in layers]
        self.student_layers = matched_layers(self.distil, shape.layers, layers[0])[0]

    @torch.no_grad()
    def read(self, micro_batch: MicroBatch, compiled: CompiledParts | None = None) -> Targets:
        """The targets of a micro-batch."""
        outputs = [
            self._read(net, micro_batch, layers, compiled) for net, layers in zip(self.nets, self.layers, strict=True)
        ]
        predictions, states, hidden = (list(column) for column in zip(*outputs, strict=True))
        return Targets(predictions, states, hidden)

    def _read(
        self, net: BaseNet, micro_batch: MicroBatch, layers: Sequence[int], compiled: CompiledParts | None
    ) -> tuple[Prediction, Tensor, list[Tensor]]:
        with autocast(micro_batch.inputs.device, self.precision), collect_blocks(net, layers) as hidden:
            states_NTE = net(
                micro_batch.inputs, documents_NT=micro_batch.documents, types_NT=micro_batch.types, compiled=compiled
            )
            states_ME = take_labelled(states_NTE.to(self.precision), micro_batch)
            x_ME = net.head_input(states_ME).to(self.precision)
        return Prediction(x_ME, net.head, net.head_bias), states_ME, [take_labelled(one, micro_batch) for one in hidden]


def open_teachers(train: TrainConfig, shape: Shape, device: torch.device, precision: torch.dtype) -> Teachers | None:
    """The teachers of a run; None if it has none."""
    return Teachers(train, shape, device, precision) if train.distil.teachers else None


def take_labelled(states_NTE: Tensor, micro_batch: MicroBatch) -> Tensor:
    """The hidden states as [M, E]: of all tokens, or of those that the micro-batch has labels for."""
    states_ME = states_NTE.flatten(0, 1)
    return states_ME if micro_batch.positions is None else states_ME.index_select(0, micro_batch.positions.flatten())


@contextmanager
def collect_blocks(net: BaseNet, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """A list that gets the hidden states after these blocks while the net runs."""
    states_by_layer: dict[int, Tensor] = {}
    ordered: list[Tensor] = []
    handles = []
    for layer in dict.fromkeys(layers):
        handles.append(net.blocks[layer].register_forward_hook(partial(_keep, states_by_layer, layer)))
    try:
        yield ordered
    finally:
        for handle in handles:
            handle.remove()
        ordered += [states_by_layer[layer] for layer in layers if layer in states_by_layer]


def _keep(states: dict[int, Tensor], layer: int, module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
    states[layer] = out
