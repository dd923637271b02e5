"""The teachers' most likely tokens, computed for `textmill cache-teacher`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from textmill.config import RunConfig
from textmill.devices import open_device, torch_dtype
from textmill.engines.distillation.teachers_torch import Teachers
from textmill.engines.distillation.terms_torch import most_likely
from textmill.engines.objective.micro_batches_torch import micro_batches
from textmill.engines.shared_torch import attention_order, check_fields
from textmill.models import Shape
from textmill.tokens.batches.batch import Batch

PASS_TOKENS = {"cuda": 1 << 15, "cpu": 1 << 12}
"""Tokens that the teachers read at a time."""


def is_exact(config: RunConfig) -> bool:
    """Whether predictions are computed in fp32."""
    return torch_dtype(config.engine.precision, open_device(config.engine.device)) == torch.float32


class TopPredictor:
    """The teachers of a run, on their device."""

    def __init__(self, config: RunConfig, shape: Shape) -> None:
        """`shape` is that of the model that learns from them."""
        self.device = open_device(config.engine.device)
        self.precision = torch_dtype(config.engine.precision, self.device)
        only_kl = {"mse": 0.0, "cosine": 0.0, "hidden": 0.0, "student_layers": [], "teacher_layers": []}
        self.train = config.train.model_copy(update={"distil": config.train.distil.model_copy(update=only_kl)})
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
