"""LossModule: a net and its loss as one torch module, as DeepSpeed needs them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from textmill.config import TrainConfig
from textmill.devices import autocast
from textmill.engines.losses_torch import loss_and_correct, summed_loss
from textmill.engines.shared_torch import attention_order, hidden_states
from textmill.models.base_torch import BaseNet


class LossModule(nn.Module):
    """Net and loss as one module: ZeRO-3 gathers weights by module, and both use the head's."""

    def __init__(self, net: BaseNet, train: TrainConfig, precision: torch.dtype, mixed: bool) -> None:
        super().__init__()
        self.net, self.train_config, self.precision, self.mixed = net, train, precision, mixed

    def forward(
        self, inputs: Tensor, labels: Tensor, weights: Tensor | None, keys: Tensor | None, documents: Tensor | None
    ) -> Any:
        """The loss of a micro-batch; without token weights, the sums of its losses and of its correct predictions."""
        train, vocab = self.train_config, self.net.shape.vocab
        with autocast(inputs.device, self.precision) if self.mixed else nullcontext(), attention_order(inputs.device):
            x_ME = hidden_states(self.net, inputs, keys, documents, self.precision)
        if weights is None:
            losses, correct = loss_and_correct(x_ME, self.net.head, labels.flatten(), vocab)
            return losses.sum(), correct.sum()
        return summed_loss(
            x_ME, self.net.head, labels.flatten(), weights.flatten(), vocab, train.label_smoothing, train.z_loss
        )
