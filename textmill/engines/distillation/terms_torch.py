"""The terms of distillation that compare logits, computed in chunks of tokens, so that all logits never exist at once.

Shapes in names: M tokens, E width, V vocabulary, K teachers. The gradient is computed in forward, by formula, while a
chunk's logits exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from textmill.config import TrainConfig
from textmill.engines.distillation.sizes import chunk_tokens
from textmill.engines.losses_torch import GradientInForward, add_bias
from textmill.kernels.matmul_torch import matmul
from textmill.tokens.batches.batch import IGNORED


class Prediction(NamedTuple):
    """What gives a teacher's logits: the input of its head, and the head."""

    x_ME: Tensor
    head_VE: Tensor
    bias_V: Tensor | None


class Terms(NamedTuple):
    """The settings of a loss, as plain values: torch.compile reads them."""

    labels: float
    kl: float
    mse: float
    temperature: float
    divergence: str
    smoothing: float
    z: float


def terms_of(train: TrainConfig) -> Terms:
    """The settings of the terms that compare logits."""
    one = train.distil
    given = (one.labels, one.kl, one.mse, one.temperature, one.divergence)
    return Terms(*given, train.label_smoothing, train.z_loss)


def distillation_loss(
    x_ME: Tensor, head_VE: Tensor, labels_M: Tensor, weights_M: Tensor, vocab: int, teachers: Sequence[Prediction],
    train: TrainConfig, report: Tensor, *, ends: bool = False, bias_V: Tensor | None = None, compiled: bool = False,
) -> Tensor:  # fmt: skip
    """The weighted sum of the labels' losses, and of the divergence and squared difference of logits.

    `report` [3] gets these three sums added, without the weights of the terms. Tokens without a label do not count.
    """
    compute = _compiled_chunk() if compiled else chunk_terms
    loss: Tensor = _DistillationLoss.apply(  # type: ignore[no-untyped-call]
        x_ME, head_VE, labels_M, weights_M, vocab, teachers, (compute, terms_of(train)), report, ends, bias_V
    )
    return loss


class _DistillationLoss(GradientInForward):
    @staticmethod
    def forward(
        ctx: Any, x_ME: Tensor, head_VE: Tensor, labels_M: Tensor, weights_M: Tensor, vocab: int,
        teachers: Sequence[Prediction], how: tuple[Callable[..., tuple[Tensor, Tensor]], Terms], report: Tensor,
        ends: bool, bias_V: Tensor | None,
    ) -> Tensor:  # fmt: skip
        compute, terms = how
        heads = [one.head_VE.to(one.x_ME.dtype) for one in teachers]

        def compute_chunk(rows: slice, head: Tensor) -> tuple[Tensor, Tensor]:
            logits_MV = add_bias(matmul(x_ME[rows], head.T), bias_V)
            given = [
                add_bias(matmul(one.x_ME[rows], taught.T), one.bias_V)
                for one, taught in zip(teachers, heads, strict=True)
            ]
            sums, gradient_MV = compute(logits_MV, given, labels_M[rows], weights_M[rows], vocab, terms)
            report.add_(sums)
            return terms.labels * sums[0] + terms.kl * sums[1] + terms.mse * sums[2], gradient_MV

        chunk = chunk_tokens(vocab, compiled=compute is not chunk_terms) if x_ME.is_cuda else None
        return GradientInForward.compute(ctx, x_ME, head_VE, compute_chunk, ends, bias_V, chunk)


@lru_cache
def _compiled_chunk() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(chunk_terms, dynamic=False)


def chunk_terms(
    logits_MV: Tensor, teachers: Sequence[Tensor], labels_M: Tensor, weights_M: Tensor, vocab: int, terms: Terms
) -> tuple[Tensor, Tensor]:
    """The sums of the labels' losses, the divergence and the squared difference, and the gradient of their sum.

    Written without changes in place, so that a compiler can join it into a few passes over the logits.
    """
    student_MV = logits_MV[:, :vocab].float()
    values, gradient_MV = compare_logits(student_MV, [one[:, :vocab].float() for one in teachers], terms)
    label_values_M, label_gradient_MV = _label_terms(student_MV, labels_M, terms)
    gradient_MV = (gradient_MV + label_gradient_MV * terms.labels) * weights_M[:, None]
    sums = torch.stack([(one * weights_M).sum() for one in (label_values_M, *values)])
    padding = logits_MV.shape[1] - vocab
    return sums, torch.nn.functional.pad(gradient_MV.to(logits_MV.dtype), (0, padding))


def _label_terms(student_MV: Tensor, labels_M: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each label, 0 without one, and its gradient."""
    labelled_M, vocab = labels_M != IGNORED, student_MV.shape[1]
    log_sum_M = student_MV.logsumexp(1)
    own_M = student_MV.gather(1, labels_M.where(labelled_M, 0).long()[:, None])[:, 0]
    losses_M = log_sum_M - (1 - terms.smoothing) * own_M + terms.z * log_sum_M.square()
    if terms.smoothing:
        losses_M = losses_M - terms.smoothing * student_MV.mean(1)
    gradient_MV = (student_MV - log_sum_M[:, None]).exp() * (1 + 2 * terms.z * log_sum_M)[:, None]
    is_label_MV = torch.arange(vocab, device=labels_M.device)[None] == labels_M[:, None]
    gradient_MV = gradient_MV - is_label_MV * (1 - terms.smoothing) - terms.smoothing / vocab
    return losses_M.where(labelled_M, 0), gradient_MV * labelled_M[:, None]


def compare_logits(
    student_MV: Tensor, teachers: Sequence[Tensor], terms: Terms
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Divergence and squared difference of each token, and the gradient of their weighted sum."""
    gradient_MV = torch.zeros_like(student_MV)
    divergence_M = square_M = student_MV.new_zeros(len(student_MV))
    if terms.kl:
        divergence_M, found = _divergence(student_MV, teachers, terms)
        gradient_MV = gradient_MV + terms.kl * found
    if terms.mse:
        difference_MV = student_MV - torch.stack(list(teachers)).mean(0)
        square_M = difference_MV.square().sum(1)
        gradient_MV = gradient_MV + 2 * terms.mse * difference_MV
    return (divergence_M, square_M), gradient_MV


def _divergence(student_MV: Tensor, teachers: Sequence[Tensor], terms: Terms) -> tuple[Tensor, Tensor]:
    """The divergence times T squared, and its gradient, which is that of logits / T, times T."""
    heat = terms.temperature
    target_MV = torch.stack([(logits / heat).log_softmax(1) for logits in teachers])
    target_MV = target_MV[0] if len(teachers) == 1 else target_MV.logsumexp(0) - math.log(len(teachers))
    own_MV = (student_MV / heat).log_softmax(1)
    if terms.divergence == "forward":
        divergence_M = (target_MV.exp() * (target_MV - own_MV)).sum(1)
        gradient_MV = own_MV.exp() - target_MV.exp()
    else:
        other_MV = target_MV
        if terms.divergence == "jensen_shannon":
            other_MV = torch.logaddexp(target_MV, own_MV) - math.log(2)
        ratio_MV, own = own_MV - other_MV, own_MV.exp()
        divergence_M = (own * ratio_MV).sum(1)
        gradient_MV = own * (ratio_MV - divergence_M[:, None])
        if terms.divergence == "jensen_shannon":
            divergence_M = (divergence_M + (target_MV.exp() * (target_MV - other_MV)).sum(1)) / 2
            gradient_MV = gradient_MV / 2
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
