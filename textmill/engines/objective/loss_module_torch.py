"""LossModule: a net and its loss as one torch module, as DeepSpeed needs them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from textmill.config import TrainConfig
from textmill.devices import autocast
from textmill.engines.distillation.teachers_torch import CachedTeachers, Teachers
from textmill.engines.objective.heads_torch import open_heads
from textmill.engines.objective.micro_batches_torch import MicroBatch
from textmill.engines.shared_torch import attention_order
from textmill.models.base_torch import BaseNet


class LossModule(nn.Module):
    """Net and loss as one module: ZeRO-3 gathers weights by module, and both use the head's."""

    def __init__(
        self,
        net: BaseNet,
        train: TrainConfig,
        precision: torch.dtype,
        mixed: bool,
        teachers: Teachers | CachedTeachers | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.train_config = train
        self.precision = precision
        self.mixed = mixed
        self.teachers = teachers

    def forward(self, *tensors: Tensor | None) -> Any:
        """The loss of a `MicroBatch` and what to report of it; without token weights, its sums."""
        micro_batch = MicroBatch(*tensors)  # type: ignore[arg-type]
        device = micro_batch.inputs.device
        with autocast(device, self.precision) if self.mixed else nullcontext(), attention_order(device):
            heads = open_heads(
                self.net,
                micro_batch,
                self.precision,
                teachers=self.teachers if micro_batch.weights is not None else None,
            )
        if micro_batch.weights is None:
            return heads.sums()
        return heads.training_loss(self.train_config, None, starts_backward=False)
