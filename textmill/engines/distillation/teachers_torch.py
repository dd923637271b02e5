"""Teachers in torch: frozen nets whose predictions and hidden states are targets of training.

`TopPredictor` computes the most likely tokens that `textmill cache-teacher` writes.

Shapes in names: M tokens, E width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from textmill.config import EngineConfig, TrainConfig
from textmill.devices import attention_order, autocast, open_device, torch_dtype
from textmill.engines.distillation.loss_torch import Prediction, TeacherOutput, Top, most_likely
from textmill.engines.distillation.teachers import check_teacher, check_top_k, matched_layers, teacher_folder
from textmill.engines.micro_batches import MicroBatch, check_fields, micro_batches
from textmill.models import Shape
from textmill.models.base_torch import BaseNet, CompiledParts
from textmill.models.nets_torch import open_net
from textmill.tokens.batches.batch import Batch


class Targets(NamedTuple):
    """What the teachers computed for a micro-batch's labelled tokens."""

    output: TeacherOutput
    states: list[Tensor] = []
    """The last hidden states of each teacher, [M, E]."""
    hidden: list[list[Tensor]] = []
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
        return Targets(TeacherOutput(predictions), states, hidden)

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


class CachedTeachers:
    """Teachers whose most likely tokens come with the batch, from `train.distil.cache`."""

    student_layers: Sequence[int] = ()

    def read(self, micro_batch: MicroBatch, compiled: CompiledParts | None = None) -> Targets:
        """The targets of a micro-batch."""
        assert micro_batch.teacher_ids is not None
        assert micro_batch.teacher_logs is not None
        return Targets(
            TeacherOutput([], Top(micro_batch.teacher_ids.flatten(0, 1), micro_batch.teacher_logs.flatten(0, 1)))
        )


def open_teachers(
    train: TrainConfig, shape: Shape, device: torch.device, precision: torch.dtype
) -> Teachers | CachedTeachers | None:
    """The teachers of a run; None if it has none."""
    if not train.distil.teachers:
        return None
    check_top_k(train.distil, shape)
    return CachedTeachers() if train.distil.cache else Teachers(train, shape, device, precision)


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


PASS_TOKENS = {"cuda": 1 << 15, "cpu": 1 << 12}
"""Tokens that the teachers read at a time."""


def is_exact(engine: EngineConfig) -> bool:
    """Whether predictions are computed in fp32."""
    return torch_dtype(engine.precision, open_device(engine.device)) == torch.float32


class TopPredictor:
    """The teachers of a run, on their device."""

    def __init__(self, engine: EngineConfig, train: TrainConfig, shape: Shape) -> None:
        """`shape` is that of the model that learns from them."""
        self.device = open_device(engine.device)
        self.precision = torch_dtype(engine.precision, self.device)
        only_kl = {"mse": 0.0, "cosine": 0.0, "hidden": 0.0, "student_layers": [], "teacher_layers": []}
        self.train = train.model_copy(update={"distil": train.distil.model_copy(update=only_kl)})
        self.teachers = Teachers(self.train, shape, self.device, self.precision)
        self.shape = shape

    def samples_of_pass(self, length: int) -> int:
        """How many samples of this length to predict at a time."""
        return max(1, PASS_TOKENS.get(self.device.type, PASS_TOKENS["cpu"]) // length)

    @torch.no_grad()
    def predict(self, batch: Batch) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """The most likely tokens [samples, length, k] and log-probabilities [samples, length, k + 1]."""
        net = self.teachers.nets[0]
        for teacher in self.teachers.nets:
            check_fields(batch, teacher.shape)
        (_, part), *_ = micro_batches(batch, net, len(batch.inputs), self.device)
        with attention_order(self.device):
            output = self.teachers.read(part).output
            top = most_likely(output.predictions, self.shape.vocab, self.train)
        shape = (*batch.inputs.shape, -1)
        return top.ids_MK.cpu().numpy().reshape(shape), top.logs_ML.float().cpu().numpy().reshape(shape)
