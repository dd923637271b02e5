"""The loss of a finetuned head, whose labels are classes or positions instead of tokens of the vocabulary.

Shapes in names: N samples, T tokens, K labels of a sample, C classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from textmill.config import TrainConfig
from textmill.engines.objective.micro_batches_torch import MicroBatch
from textmill.engines.tensor_parallel_torch import TensorParallel
from textmill.models.base_torch import BaseNet
from textmill.models.execution_torch import EAGER, Execution
from textmill.tokens.batches.batch import IGNORED


class LabelStates:
    """The logits of a micro-batch's labels: compute them under autocast."""

    def __init__(
        self, net: BaseNet, micro_batch: MicroBatch, precision: torch.dtype, execution: Execution = EAGER
    ) -> None:
        assert micro_batch.positions is not None
        self.micro_batch = micro_batch
        states = micro_batch.hidden_states(net, execution)
        logits_NKC = net.label_logits(
            states.to(precision), micro_batch.positions, micro_batch.documents, micro_batch.keys
        ).float()
        self.count = logits_NKC.shape[1]
        labels_M = micro_batch.labels[:, : self.count].flatten().long()
        logits_MC = logits_NKC.flatten(0, 1)
        self.losses_M = F.cross_entropy(logits_MC, labels_M, ignore_index=IGNORED, reduction="none")
        self.correct_M = logits_MC.argmax(1) == labels_M

    def training_loss(
        self, train: TrainConfig, tensor: TensorParallel | None, *, starts_backward: bool
    ) -> tuple[Tensor, Tensor]:
        """The loss for the backward pass, and what to report; each tensor-parallel rank has a part of the loss."""
        assert self.micro_batch.weights is not None
        loss = (self.losses_M * self.micro_batch.weights[:, : self.count].flatten()).sum()
        return loss / (tensor.count if tensor else 1), loss.detach()

    def sums(self, tensor: TensorParallel | None = None) -> list[Tensor]:
        """The summed loss and the number of correct predictions."""
        return [self.losses_M.sum(), self.correct_M.sum()]
