"""The losses of a micro-batch: the head's cross-entropy, and that of a pair head if the net has one.

Shapes in names: M tokens, E width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from textmill.config import TrainConfig
from textmill.engines import Sums
from textmill.engines.losses_tensor_parallel_torch import tensor_parallel_loss, tensor_parallel_loss_and_correct
from textmill.engines.losses_torch import loss_and_correct, summed_loss
from textmill.engines.objective.micro_batches_torch import MicroBatch
from textmill.engines.tensor_parallel_torch import TensorParallel
from textmill.models.base_torch import BaseNet
from textmill.models.execution_torch import EAGER, Execution
from textmill.tokens.batches.batch import IGNORED

PAIR, PAIR_LOSS = "pair", "pair_loss"
"""The name of the pair head in evaluations, and of its loss in the log of training."""


class HeadStates:
    """What the heads read: compute it under autocast."""

    def __init__(self, net: BaseNet, part: MicroBatch, precision: torch.dtype, execution: Execution = EAGER) -> None:
        states: Tensor = net(
            part.inputs, part.keys, documents_NT=part.documents, execution=execution, types_NT=part.types
        )
        x_ME = states.to(precision).flatten(0, 1)
        self.net, self.part = net, part
        self.pair_losses: Tensor | None = None
        self.pair_correct: Tensor | None = None
        if part.pair_positions is not None and part.pair_labels is not None:
            logits = net.pair_logits(x_ME.index_select(0, part.pair_positions.flatten())).float()
            labels = part.pair_labels.flatten().long()
            self.pair_losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
            self.pair_correct = logits.argmax(1) == labels
        if part.positions is not None:
            x_ME = x_ME.index_select(0, part.positions.flatten())
        self.x_ME = net.head_input(x_ME).to(precision)

    def training_loss(self, train: TrainConfig, tensor: TensorParallel | None, *, ends: bool) -> tuple[Tensor, Tensor]:
        """The loss for the backward pass, and the losses to report: the head's, or both heads' as [2].

        Tensor-parallel ranks each compute a part of the gradient, so each has a part of the pairs' loss.
        """
        net, part = self.net, self.part
        assert part.weights is not None
        given = (self.x_ME, net.head, part.labels.flatten(), part.weights.flatten(), net.shape.vocab)
        loss = (
            tensor_parallel_loss(*given, train.label_smoothing, train.z_loss, tensor, net.head_bias)
            if tensor
            else summed_loss(*given, train.label_smoothing, train.z_loss, net.fp8, ends=ends, bias_V=net.head_bias)
        )
        if self.pair_losses is None or part.pair_weights is None:
            return loss, loss.detach()
        pair = (self.pair_losses * part.pair_weights.flatten()).sum()
        return loss + pair / (tensor.count if tensor else 1), torch.stack([loss.detach(), pair.detach()])

    def sums(self, tensor: TensorParallel | None = None) -> list[Tensor]:
        """The summed loss and the number of correct predictions; also those of the pairs, if there is a pair head."""
        net, given = self.net, (self.x_ME, self.net.head, self.part.labels.flatten(), self.net.shape.vocab)
        losses, correct = (
            tensor_parallel_loss_and_correct(*given, tensor, net.head_bias)
            if tensor
            else loss_and_correct(*given, net.head_bias)
        )
        found = [losses.sum(), correct.sum()]
        if self.pair_losses is not None and self.pair_correct is not None:
            found += [self.pair_losses.sum(), self.pair_correct.sum()]
        return found


def join_sums(parts: list[list[Tensor]]) -> list[float]:
    """The `sums` of all micro-batches together, in fp64 on the host: not every device has fp64."""
    return [float(torch.stack(values).cpu().double().sum()) for values in zip(*parts, strict=True)]


def named_sums(totals: list[float], tokens: int, pairs: list[int]) -> Sums:
    """The result of an evaluation from totals over all ranks; pairs are left out if the batch has no labels of them."""
    others = {PAIR: Sums(totals[2], pairs[0], round(totals[3]))} if pairs else {}
    return Sums(totals[0], tokens, round(totals[1]), others)
