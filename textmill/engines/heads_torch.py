"""The losses of a micro-batch: the cross-entropy of the head, that of a pair head, or that of a finetuned head.

Engines call `forward_heads(net, micro_batch, ...)`, which runs the net, then `training_loss` or, in evaluation, `sums`.

Shapes in names: N samples, K labels of a sample, M tokens, E width, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from textmill.config import DistilConfig, TrainConfig
from textmill.config.own_files import is_own_file, load_part
from textmill.engines.distillation.loss_torch import cosine_loss, distillation_loss, hidden_loss
from textmill.engines.distillation.teachers_torch import Teachers, collect_blocks, take_labelled
from textmill.engines.losses_torch import (
    LossFormula,
    WeightedLabels,
    loss_and_correct,
    summed_loss,
    tensor_parallel_loss,
    tensor_parallel_loss_and_correct,
)
from textmill.engines.micro_batches import PAIR_LOSS, MicroBatch
from textmill.engines.tensor_parallel_torch import TensorParallel
from textmill.errors import TextmillError
from textmill.models.base_torch import BaseNet, CompiledParts
from textmill.tokens.batches.batch import IGNORED

AUXILIARY_LOSS = "auxiliary_loss"
LOSS_TOLERANCE = 1e-3
"""Largest relative difference between losses that must be equal, in `check_own_loss`."""


def forward_heads(
    net: BaseNet,
    micro_batch: MicroBatch,
    precision: torch.dtype,
    compiled: CompiledParts | None = None,
    teachers: Teachers | None = None,
    states: Tensor | None = None,
) -> HeadStates | LabelStates:
    """Run the net on a micro-batch, up to the input of its heads; call it under autocast.

    `states` are its hidden states, if a pipeline has computed them."""
    if net.has_label_head:
        return LabelStates(net, micro_batch, precision, compiled)
    return HeadStates(net, micro_batch, precision, compiled, teachers, states)


class HeadStates:
    """The hidden states of a micro-batch that the heads read, and the losses computed from them."""

    def __init__(
        self,
        net: BaseNet,
        micro_batch: MicroBatch,
        precision: torch.dtype,
        compiled: CompiledParts | None = None,
        teachers: Teachers | None = None,
        states: Tensor | None = None,
    ) -> None:
        self.net = net
        self.micro_batch = micro_batch
        self.teachers = teachers
        self.compiled = compiled
        with collect_blocks(net, teachers.student_layers if teachers else ()) as self.hidden:
            states = micro_batch.hidden_states(net, compiled) if states is None else states
        # A part of the step's loss, as large as the micro-batch's part of the labels.
        self.auxiliary_loss: Tensor | None = None
        if net.has_auxiliary_loss and micro_batch.weights is not None:
            self.auxiliary_loss = net.take_auxiliary_loss() * micro_batch.weights.sum()
        x_ME = states.to(precision).flatten(0, 1)
        self.pair_losses: Tensor | None = None
        self.pair_correct: Tensor | None = None
        if micro_batch.pair_positions is not None and micro_batch.pair_labels is not None:
            logits = net.pair_logits(x_ME.index_select(0, micro_batch.pair_positions.flatten())).float()
            labels = micro_batch.pair_labels.flatten().long()
            self.pair_losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
            self.pair_correct = logits.argmax(1) == labels
        if micro_batch.positions is not None:
            x_ME = x_ME.index_select(0, micro_batch.positions.flatten())
        self.states_ME = x_ME
        self.x_ME = net.head_input(x_ME).to(precision)

    def training_loss(
        self, train: TrainConfig, tensor: TensorParallel | None, *, gradient_is_one: bool
    ) -> tuple[Tensor, Tensor]:
        """The loss for the backward pass, and what to report: the labels' loss, and all of `term_names` behind it.

        Tensor-parallel ranks each compute a part of the gradient, so each has a part of the pairs' loss.
        """
        terms: list[Tensor] = []
        if self.teachers:
            loss, label_loss, terms = self._distillation_loss(self.teachers, train, tensor, gradient_is_one)
        else:
            loss = self._label_loss(train, tensor, gradient_is_one)
            label_loss = loss.detach()
        if self.auxiliary_loss is not None:
            loss = loss + self.auxiliary_loss / (tensor.count if tensor else 1)
            terms = [self.auxiliary_loss.detach(), *terms]
        if self.pair_losses is not None and self.micro_batch.pair_weights is not None:
            pair_loss = (self.pair_losses * self.micro_batch.pair_weights.flatten()).sum()
            loss = loss + pair_loss / (tensor.count if tensor else 1)
            terms = [pair_loss.detach(), *terms]
        return loss, torch.stack([label_loss, *terms]) if terms else label_loss

    def _label_loss(self, train: TrainConfig, tensor: TensorParallel | None, gradient_is_one: bool) -> Tensor:
        """The weighted sum of the cross-entropy of all labels."""
        net = self.net
        if is_own_file(train.loss):
            if tensor or net.head_for_labels_only:
                raise TextmillError(
                    "train.loss: a file of your own needs a next-token model without engine.mesh.tensor"
                )
            x_NTE = self.x_ME.view(*self.micro_batch.inputs.shape, -1)
            logits_NTV = F.linear(x_NTE, net.head.to(x_NTE.dtype), net.head_bias)[..., : net.shape.vocab].float()
            loss: Tensor = load_part(train.loss, "train.loss", "loss")(logits_NTV, self.micro_batch)
            return loss
        labels = self._weighted_labels()
        formula = LossFormula(net.shape.vocab, train.label_smoothing, train.z_loss)
        if tensor:
            return tensor_parallel_loss(self.x_ME, net.head, labels, formula, tensor, net.head_bias)
        return summed_loss(
            self.x_ME, net.head, labels, formula, bias_V=net.head_bias, fp8=net.fp8, gradient_is_one=gradient_is_one
        )

    def _weighted_labels(self) -> WeightedLabels:
        micro_batch = self.micro_batch
        assert micro_batch.weights is not None
        return WeightedLabels(micro_batch.labels.flatten(), micro_batch.weights.flatten())

    def _distillation_loss(
        self, teachers: Teachers, train: TrainConfig, tensor: TensorParallel | None, gradient_is_one: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The loss for the backward pass, the labels' loss, and the teachers' terms, these two without weights."""
        net = self.net
        micro_batch = self.micro_batch
        distil = train.distil
        targets = teachers.read(micro_batch, self.compiled)
        labels = self._weighted_labels()
        weights_M = labels.weights_M
        sums = weights_M.new_zeros(3)
        loss = distillation_loss(
            self.x_ME,
            net.head,
            labels,
            net.shape.vocab,
            targets.predictions,
            train,
            sums,
            gradient_is_one=gradient_is_one,
            bias_V=net.head_bias,
            compiled=self.compiled is not None,
            tensor=tensor,
        )
        label_loss, kl, mse = sums
        terms = {"kl": kl, "mse": mse}
        if distil.cosine:
            terms["cosine"] = cosine_loss(self.states_ME, targets.states, weights_M)
            loss = loss + distil.cosine / (tensor.count if tensor else 1) * terms["cosine"]
        if distil.hidden:
            student_states = [take_labelled(states, micro_batch) for states in self.hidden]
            terms["hidden"] = hidden_loss(student_states, targets.hidden, weights_M)
            loss = loss + distil.hidden * terms["hidden"]
        return loss, label_loss, [terms[name].detach() for name in distil.terms]

    def sums(self, tensor: TensorParallel | None = None) -> list[Tensor]:
        """The summed loss and the number of correct predictions; also those of the pairs, if there is a pair head."""
        net = self.net
        labels_M = self.micro_batch.labels.flatten()
        if tensor:
            losses, correct = tensor_parallel_loss_and_correct(
                self.x_ME, net.head, labels_M, net.shape.vocab, tensor, net.head_bias
            )
        else:
            losses, correct = loss_and_correct(self.x_ME, net.head, labels_M, net.shape.vocab, net.head_bias)
        sums = [losses.sum(), correct.sum()]
        if self.pair_losses is not None and self.pair_correct is not None:
            sums += [self.pair_losses.sum(), self.pair_correct.sum()]
        return sums


class LabelStates:
    """The logits of a micro-batch's labels: compute them under autocast."""

    def __init__(
        self, net: BaseNet, micro_batch: MicroBatch, precision: torch.dtype, compiled: CompiledParts | None = None
    ) -> None:
        assert micro_batch.positions is not None
        self.micro_batch = micro_batch
        states = micro_batch.hidden_states(net, compiled)
        logits_NKC = net.label_logits(
            states.to(precision), micro_batch.positions, micro_batch.documents, micro_batch.keys
        ).float()
        self.count = logits_NKC.shape[1]
        labels_M = micro_batch.labels[:, : self.count].flatten().long()
        logits_MC = logits_NKC.flatten(0, 1)
        self.losses_M = F.cross_entropy(logits_MC, labels_M, ignore_index=IGNORED, reduction="none")
        self.correct_M = logits_MC.argmax(1) == labels_M

    def training_loss(
        self, train: TrainConfig, tensor: TensorParallel | None, *, gradient_is_one: bool
    ) -> tuple[Tensor, Tensor]:
        """The loss for the backward pass, and what to report; each tensor-parallel rank has a part of the loss."""
        assert self.micro_batch.weights is not None
        loss = (self.losses_M * self.micro_batch.weights[:, : self.count].flatten()).sum()
        return loss / (tensor.count if tensor else 1), loss.detach()

    def sums(self, tensor: TensorParallel | None = None) -> list[Tensor]:
        """The summed loss and the number of correct predictions."""
        return [self.losses_M.sum(), self.correct_M.sum()]


def check_own_loss(train: TrainConfig, vocab: int) -> None:
    """Refuse a loss of the user's own, if micro-batches and processes would change it, on a few random logits: it must
    be a sum over tokens with a label, each multiplied by its weight."""
    own_loss = load_part(train.loss, "train.loss", "loss")
    random = torch.Generator().manual_seed(1)
    logits_NTV = torch.randn(4, 6, vocab, generator=random)
    labels_NT = torch.randint(0, vocab, (4, 6), generator=random, dtype=torch.int32)
    labels_NT[:, 4:] = IGNORED
    labels_NT[0, 0] = IGNORED
    weights_NT = torch.rand(4, 6, generator=random) * (labels_NT != IGNORED)

    def loss_and_gradient(rows: slice, factor: float = 1.0) -> tuple[float, Tensor]:
        empty: dict[str, Any] = dict.fromkeys(MicroBatch._fields)
        given = {
            "inputs": labels_NT[rows].clamp(min=0),
            "labels": labels_NT[rows],
            "weights": weights_NT[rows] * factor,
        }
        documents_NT = torch.ones_like(given["inputs"])
        logits = logits_NTV[rows].clone().requires_grad_()
        try:
            loss = own_loss(logits, MicroBatch(**{**empty, **given, "documents": documents_NT}))
            loss.backward()
        except Exception as error:
            raise TextmillError(f"train.loss: {train.loss} fails with {type(error).__name__}: {error}") from error
        value = float(loss.detach())
        if logits.grad is None or not math.isfinite(value):
            raise TextmillError(f"train.loss: {train.loss} returns {value}; return a finite loss of the logits")
        return value, logits.grad

    whole, gradient_NTV = loss_and_gradient(slice(None))
    halves = loss_and_gradient(slice(0, 2))[0] + loss_and_gradient(slice(2, None))[0]
    doubled, _ = loss_and_gradient(slice(None), 2.0)
    bound = LOSS_TOLERANCE * max(abs(whole), 1e-3)
    wrong = None
    if gradient_NTV[labels_NT == IGNORED].any():
        wrong = "tokens without a label (-100) have a gradient"
    elif abs(doubled - 2 * whole) > bound:
        wrong = f"with doubled batch.weights the loss is {doubled:.4g}, not twice {whole:.4g}"
    elif abs(halves - whole) > bound:
        wrong = f"the losses of two halves of a batch add up to {halves:.4g}, that of the batch is {whole:.4g}"
    if wrong:
        raise TextmillError(
            f"train.loss: {train.loss}: {wrong}; return (losses * batch.weights).sum(), with a loss of 0 where "
            "batch.labels is -100, or micro-batches and processes change the result (docs/own-parts.md)"
        )


def term_names(net: BaseNet, distil: DistilConfig) -> tuple[str, ...]:
    """The names of what `training_loss` reports behind the labels' loss."""
    own = [PAIR_LOSS] * net.has_pair_head + [AUXILIARY_LOSS] * net.has_auxiliary_loss
    return (*own, *(f"distil_{name}" for name in distil.terms))


def new_report(names: Sequence[str], device: torch.device) -> Tensor:
    """Zeros, to which what `training_loss` reports of each micro-batch is added."""
    return torch.zeros((1 + len(names),) if names else (), device=device)


def split_loss_terms(total: Tensor, names: Sequence[str], pairs: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """The labels' loss and the other terms by name, from sums of what `training_loss` reports."""
    if not names:
        return total, {}
    terms = dict(zip(names, total[1:], strict=True))
    if not pairs:
        terms.pop(PAIR_LOSS, None)
    return total[0], terms


def join_sums(parts: list[list[Tensor]]) -> list[float]:
    """The `sums` of all micro-batches, added in fp64 on the host: not every device has fp64.

    [[loss 1, correct 1], [loss 2, correct 2]] -> [loss 1 + loss 2, correct 1 + correct 2]
    """
    return [float(torch.stack(values).cpu().double().sum()) for values in zip(*parts, strict=True)]
