"""The terms of distillation that compare logits, computed in chunks of tokens, so that all logits never exist at once.

Shapes in names: M tokens, E width, V vocabulary, K teachers. The gradient is computed in forward, by formula, while a
chunk's logits exist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from textmill.config import DistilConfig, TrainConfig
from textmill.engines.distillation.sizes import CHUNK_LOGITS
from textmill.engines.losses_torch import GradientInForward, add_bias, label_loss_and_gradient
from textmill.kernels.matmul_torch import matmul


class Prediction(NamedTuple):
    """What gives a teacher's logits: the input of its head, and the head."""

    x_ME: Tensor
    head_VE: Tensor
    bias_V: Tensor | None


def distillation_loss(
    x_ME: Tensor, head_VE: Tensor, labels_M: Tensor, weights_M: Tensor, vocab: int, teachers: Sequence[Prediction],
    train: TrainConfig, report: Tensor, *, ends: bool = False, bias_V: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The weighted sum of the labels' losses, and of the divergence and squared difference of logits.

    `report` [3] gets these three sums added, without the weights of the terms. Tokens without a label do not count.
    """
    loss: Tensor = _DistillationLoss.apply(  # type: ignore[no-untyped-call]
        x_ME, head_VE, labels_M, weights_M, vocab, teachers, train, report, ends, bias_V
    )
    return loss


class _DistillationLoss(GradientInForward):
    @staticmethod
    def forward(
        ctx: Any, x_ME: Tensor, head_VE: Tensor, labels_M: Tensor, weights_M: Tensor, vocab: int,
        teachers: Sequence[Prediction], train: TrainConfig, report: Tensor, ends: bool, bias_V: Tensor | None,
    ) -> Tensor:  # fmt: skip
        distil = train.distil

        def compute_chunk(rows: slice, head: Tensor) -> tuple[Tensor, Tensor]:
            logits_MV = add_bias(matmul(x_ME[rows], head.T), bias_V)
            given = [_logits(teacher, rows, vocab) for teacher in teachers]
            losses, gradient_MV = compare_logits(logits_MV[:, :vocab].float(), given, distil)
            weight_M = weights_M[rows]
            label_losses_M = label_loss_and_gradient(
                logits_MV, labels_M[rows], weight_M * distil.labels, vocab, train.label_smoothing, train.z_loss
            )
            logits_MV[:, :vocab] += gradient_MV.mul_(weight_M[:, None]).to(logits_MV.dtype)
            sums = torch.stack([(values_M * weight_M).sum() for values_M in (label_losses_M, *losses)])
            report.add_(sums)
            factors = (distil.labels, distil.kl, distil.mse)
            return sum((factor * one for factor, one in zip(factors, sums, strict=True)), sums.new_zeros(())), logits_MV

        chunk = max(1, CHUNK_LOGITS // vocab) if x_ME.is_cuda else None
        return GradientInForward.compute(ctx, x_ME, head_VE, compute_chunk, ends, bias_V, chunk)


def _logits(teacher: Prediction, rows: slice, vocab: int) -> Tensor:
    head = teacher.head_VE.to(teacher.x_ME.dtype)
    return add_bias(matmul(teacher.x_ME[rows], head.T), teacher.bias_V)[:, :vocab].float()


def compare_logits(
    student_MV: Tensor, teachers: Sequence[Tensor], distil: DistilConfig
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Divergence and squared difference of each token, and the gradient of their weighted sum."""
    gradient_MV = torch.zeros_like(student_MV)
    nothing_M = student_MV.new_zeros(len(student_MV))
    divergence_M = square_M = nothing_M
    if distil.kl:
        divergence_M, found = _divergence(student_MV, teachers, distil)
        gradient_MV += found.mul_(distil.kl)
    if distil.mse:
        difference_MV = student_MV - torch.stack(list(teachers)).mean(0)
        square_M = difference_MV.square().sum(1)
        gradient_MV.add_(difference_MV, alpha=2 * distil.mse)
    return (divergence_M, square_M), gradient_MV


def _divergence(student_MV: Tensor, teachers: Sequence[Tensor], distil: DistilConfig) -> tuple[Tensor, Tensor]:
    """The divergence times T squared, and its gradient, which is that of logits / T, times T."""
    heat = distil.temperature
    target_MV = torch.stack([(logits / heat).log_softmax(1) for logits in teachers])
    target_MV = target_MV[0] if len(teachers) == 1 else target_MV.logsumexp(0) - math.log(len(teachers))
    own_MV = (student_MV / heat).log_softmax(1)
    if distil.divergence == "forward":
        divergence_M = (target_MV.exp() * (target_MV - own_MV)).sum(1)
        gradient_MV = own_MV.exp() - target_MV.exp()
    else:
        other_MV = target_MV
        if distil.divergence == "jensen_shannon":
            other_MV = torch.logaddexp(target_MV, own_MV) - math.log(2)
        ratio_MV, own = own_MV - other_MV, own_MV.exp()
        divergence_M = (own * ratio_MV).sum(1)
        gradient_MV = own * (ratio_MV - divergence_M[:, None])
        if distil.divergence == "jensen_shannon":
            divergence_M = (divergence_M + (target_MV.exp() * (target_MV - other_MV)).sum(1)) / 2
            gradient_MV /= 2
    return divergence_M * heat**2, gradient_MV * heat


def cosine_loss(own_ME: Tensor, teachers: Sequence[Tensor], weights_M: Tensor) -> Tensor:
    """The weighted sum of 1 - cosine between hidden states, the mean over the teachers."""
    similar = [torch.nn.functional.cosine_similarity(own_ME.float(), one.float(), dim=1) for one in teachers]
    return ((1 - torch.stack(similar).mean(0)) * weights_M).sum()


def hidden_loss(own: Sequence[Tensor], teachers: Sequence[Sequence[Tensor]], weights_M: Tensor) -> Tensor:
    """The weighted sum of the mean squared difference of hidden states [M, E], the mean over blocks and teachers."""
    differences = [
        (mine.float() - given.float()).square().mean(1)
        for teacher in teachers
        for mine, given in zip(own, teacher, strict=True)
    ]
    return (torch.stack(differences).mean(0) * weights_M).sum()
