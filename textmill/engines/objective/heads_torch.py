"""The losses of a micro-batch: the head's cross-entropy, and that of a pair head if the net has one.

Shapes in names: M tokens, E width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from textmill.config import DistilConfig, TrainConfig
from textmill.engines.distillation.teachers_torch import CachedTeachers, Teachers, collect_blocks, take_labelled
from textmill.engines.distillation.terms_torch import cosine_loss, distillation_loss, hidden_loss
from textmill.engines.losses_tensor_parallel_torch import tensor_parallel_loss, tensor_parallel_loss_and_correct
from textmill.engines.losses_torch import loss_and_correct, summed_loss
from textmill.engines.objective.label_heads_torch import LabelStates
from textmill.engines.objective.labels import PAIR_LOSS
from textmill.engines.objective.micro_batches_torch import MicroBatch
from textmill.engines.tensor_parallel_torch import TensorParallel
from textmill.models.base_torch import BaseNet
from textmill.models.execution_torch import EAGER, Execution
from textmill.tokens.batches.batch import IGNORED


def open_heads(
    net: BaseNet, part: MicroBatch, precision: torch.dtype, execution: Execution = EAGER,
    teachers: Teachers | CachedTeachers | None = None,
) -> HeadStates | LabelStates:  # fmt: skip
    """What the heads of a net compute for a micro-batch, before its losses: call it under autocast."""
    if net.has_label_head:
        return LabelStates(net, part, precision, execution)
    return HeadStates(net, part, precision, execution, teachers)


class HeadStates:
    """What the heads read: compute it under autocast."""

    def __init__(
        self, net: BaseNet, part: MicroBatch, precision: torch.dtype, execution: Execution = EAGER,
        teachers: Teachers | CachedTeachers | None = None,
    ) -> None:  # fmt: skip
        self.net, self.part, self.teachers, self.execution = net, part, teachers, execution
        with collect_blocks(net, teachers.student_layers if teachers else ()) as self.hidden:
            states: Tensor = net(
                part.inputs, part.keys, documents_NT=part.documents, execution=execution, types_NT=part.types
            )
        x_ME = states.to(precision).flatten(0, 1)
        self.pair_losses: Tensor | None = None
        self.pair_correct: Tensor | None = None
        if part.pair_positions is not None and part.pair_labels is not None:
            logits = net.pair_logits(x_ME.index_select(0, part.pair_positions.flatten())).float()
            labels = part.pair_labels.flatten().long()
            self.pair_losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
            self.pair_correct = logits.argmax(1) == labels
        if part.positions is not None:
            x_ME = x_ME.index_select(0, part.positions.flatten())
        self.states_ME = x_ME
        self.x_ME = net.head_input(x_ME).to(precision)

    def training_loss(self, train: TrainConfig, tensor: TensorParallel | None, *, ends: bool) -> tuple[Tensor, Tensor]:
        """The loss for the backward pass, and what to report: the labels' loss, and all of `term_names` behind it.

        Tensor-parallel ranks each compute a part of the gradient, so each has a part of the pairs' loss.
        """
        net, part = self.net, self.part
        assert part.weights is not None
        given = (self.x_ME, net.head, part.labels.flatten(), part.weights.flatten(), net.shape.vocab)
        terms: list[Tensor] = []
        if self.teachers:
            loss, label_loss, terms = self._distillation_loss(self.teachers, train, tensor, ends)
        elif tensor:
            loss = tensor_parallel_loss(*given, train.label_smoothing, train.z_loss, tensor, net.head_bias)
        else:
            options: Any = {"ends": ends, "cap": net.logit_softcap, "bias_V": net.head_bias}
            loss = summed_loss(*given, train.label_smoothing, train.z_loss, net.fp8, **options)
        reported = label_loss if self.teachers else loss.detach()
        if self.pair_losses is not None and part.pair_weights is not None:
            pair = (self.pair_losses * part.pair_weights.flatten()).sum()
            loss = loss + pair / (tensor.count if tensor else 1)
            terms = [pair.detach(), *terms]
        return loss, torch.stack([reported, *terms]) if terms else reported

    def _distillation_loss(
        self, teachers: Teachers | CachedTeachers, train: TrainConfig, tensor: TensorParallel | None, ends: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The loss for the backward pass, the labels' loss, and the teachers' terms, these two without weights."""
        net, part, distil = self.net, self.part, train.distil
        targets = teachers.read(part, self.execution)
        assert part.weights is not None
        weights_M = part.weights.flatten()
        sums = weights_M.new_zeros(3)
        loss = distillation_loss(
            self.x_ME, net.head, part.labels.flatten(), weights_M, net.shape.vocab, targets.output, train, sums,
            ends=ends, bias_V=net.head_bias, compiled=self.execution is not EAGER, tensor=tensor,
        )  # fmt: skip
        found = {"kl": sums[1], "mse": sums[2]}
        if distil.cosine:
            found["cosine"] = cosine_loss(self.states_ME, targets.states, weights_M)
            loss = loss + distil.cosine / (tensor.count if tensor else 1) * found["cosine"]
        if distil.hidden:
            own = [take_labelled(one, part) for one in self.hidden]
            found["hidden"] = hidden_loss(own, targets.hidden, weights_M)
            loss = loss + distil.hidden * found["hidden"]
        return loss, sums[0], [found[name].detach() for name in distil.terms]

    def sums(self, tensor: TensorParallel | None = None) -> list[Tensor]:
        """The summed loss and the number of correct predictions; also those of the pairs, if there is a pair head."""
        net, given = self.net, (self.x_ME, self.net.head, self.part.labels.flatten(), self.net.shape.vocab)
        losses, correct = (
            tensor_parallel_loss_and_correct(*given, tensor, net.head_bias)
            if tensor
            else loss_and_correct(*given, net.head_bias, net.logit_softcap)
        )
        found = [losses.sum(), correct.sum()]
        if self.pair_losses is not None and self.pair_correct is not None:
            found += [self.pair_losses.sum(), self.pair_correct.sum()]
        return found


def term_names(net: BaseNet, distil: DistilConfig) -> tuple[str, ...]:
    """The names of what `training_loss` reports behind the labels' loss."""
    return (*((PAIR_LOSS,) if net.has_pair_head else ()), *(f"distil_{name}" for name in distil.terms))


def split_reported(total: Tensor, names: Sequence[str], pairs: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """The labels' loss and the other terms by name, from sums of what `training_loss` reports."""
    if not names:
        return total, {}
    terms = dict(zip(names, total[1:], strict=True))
    return total[0], {name: one for name, one in terms.items() if pairs or name != PAIR_LOSS}


def join_sums(parts: list[list[Tensor]]) -> list[float]:
    """The `sums` of all micro-batches together, in fp64 on the host: not every device has fp64."""
    return [float(torch.stack(values).cpu().double().sum()) for values in zip(*parts, strict=True)]
