"""The terms of distillation that compare logits, of one chunk of tokens: their values and gradients, by formula.

With the student's logits s, the mean of the teachers' distributions p and a temperature T, `train.distil.divergence`
forward is T^2 KL(p || softmax(s / T)). Its gradient by s is T (softmax(s / T) - p). With `top_k`, both distributions
have K + 1 outcomes: the teachers' K most likely tokens, and any other token.

Shapes in names: M tokens, V columns of the vocabulary that a rank has, K most likely tokens. Nothing is changed in
place, so that a compiler can join all of it into a few passes over the logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from textmill.engines.distillation.terms import Terms
from textmill.engines.tensor_parallel_torch import TensorParallel
from textmill.tokens.batches.batch import IGNORED


class Top(NamedTuple):
    """The teachers' most likely tokens at each token, and how likely they are at the temperature."""

    ids_MK: Tensor
    logs_ML: Tensor
    """[M, K + 1]: the log-probability of each of them, then that of all other tokens together."""


class Columns(NamedTuple):
    """Which columns of the vocabulary the logits have; sums over the vocabulary are over all ranks."""

    begin: int = 0
    tensor: TensorParallel | None = None

    def count_real(self, local: int, vocab: int) -> int:
        """How many of a rank's columns are not padding."""
        return min(local, max(0, vocab - self.begin))

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks."""
        return values if self.tensor is None else self.tensor.all_reduce(values)

    def log_sum(self, values_MV: Tensor) -> Tensor:
        """The log of the sum of exponentials over the vocabulary."""
        if self.tensor is None:
            return values_MV.logsumexp(1)
        empty_M = values_MV.new_full((len(values_MV),), -torch.inf)
        max_M = values_MV.amax(1) if values_MV.shape[1] else empty_M
        dist.all_reduce(max_M, dist.ReduceOp.MAX, group=self.tensor.group)
        return max_M + self.sum((values_MV - max_M[:, None]).exp().sum(1)).log()


ALL_COLUMNS = Columns()
"""Without tensor parallelism: the logits have all columns."""


def chunk_terms(
    logits_MV: Tensor,
    teachers: Sequence[Tensor],
    top: Top | None,
    labels_M: Tensor,
    weights_M: Tensor,
    vocab: int,
    terms: Terms,
    columns: Columns = ALL_COLUMNS,
) -> tuple[Tensor, Tensor]:
    """The sums of the labels' losses, the divergence and the squared difference, and the gradient of their sum.

    The teachers' logits have no padding.
    """
    real = columns.count_real(logits_MV.shape[1], vocab)
    student_MV = logits_MV[:, :real].float()
    losses_M, gradient_MV = _label_terms(student_MV, labels_M, vocab, terms, columns)
    gradient_MV = gradient_MV * terms.labels
    divergence_M = square_M = torch.zeros_like(losses_M)
    if terms.kl:
        if top is None:
            divergence_M, kl_gradient_MV = _divergence(student_MV, teachers, terms, columns)
        else:
            divergence_M, kl_gradient_MV = _top_divergence(student_MV, top, terms, columns)
        gradient_MV = gradient_MV + terms.kl * kl_gradient_MV
    if terms.mse:
        difference_MV = student_MV - torch.stack([teacher_MV.float() for teacher_MV in teachers]).mean(0)
        square_M = columns.sum(difference_MV.square().sum(1))
        gradient_MV = gradient_MV + 2 * terms.mse * difference_MV
    sums = torch.stack([(values_M * weights_M).sum() for values_M in (losses_M, divergence_M, square_M)])
    gradient_MV = (gradient_MV * weights_M[:, None]).to(logits_MV.dtype)
    return sums, F.pad(gradient_MV, (0, logits_MV.shape[1] - real))


def _label_terms(
    student_MV: Tensor, labels_M: Tensor, vocab: int, terms: Terms, columns: Columns
) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each label, 0 without one, and its gradient."""
    labelled_M = labels_M != IGNORED
    log_sum_M = columns.log_sum(student_MV)
    numbers_V = torch.arange(columns.begin, columns.begin + student_MV.shape[1], device=labels_M.device)
    is_label_MV = numbers_V[None] == labels_M[:, None]
    label_logit_M = columns.sum((student_MV * is_label_MV).sum(1))
    losses_M = log_sum_M - (1 - terms.smoothing) * label_logit_M + terms.z * log_sum_M.square()
    if terms.smoothing:
        losses_M = losses_M - terms.smoothing * columns.sum(student_MV.sum(1)) / vocab
    gradient_MV = (student_MV - log_sum_M[:, None]).exp() * (1 + 2 * terms.z * log_sum_M)[:, None]
    gradient_MV = gradient_MV - is_label_MV * (1 - terms.smoothing) - terms.smoothing / vocab
    return losses_M.where(labelled_M, 0), gradient_MV * labelled_M[:, None]


def mean_log_probabilities(teachers: Sequence[Tensor], temperature: float, columns: Columns = ALL_COLUMNS) -> Tensor:
    """The log of the mean of the teachers' distributions at a temperature."""
    scaled = [logits_MV.float() / temperature for logits_MV in teachers]
    logs = [logits_MV - columns.log_sum(logits_MV)[:, None] for logits_MV in scaled]
    return logs[0] if len(logs) == 1 else torch.stack(logs).logsumexp(0) - math.log(len(logs))


def top_of(teachers: Sequence[Tensor], terms: Terms) -> Top:
    """The most likely tokens in the mean of the teachers' distributions."""
    logs_MV = mean_log_probabilities(teachers, terms.temperature)
    chosen_MK, ids_MK = logs_MV.topk(terms.top_k, 1)
    rest_M1 = logs_MV.scatter(1, ids_MK, -torch.inf).logsumexp(1, keepdim=True)
    return Top(ids_MK, torch.cat([chosen_MK, rest_M1], 1))


def _divergence(
    student_MV: Tensor, teachers: Sequence[Tensor], terms: Terms, columns: Columns
) -> tuple[Tensor, Tensor]:
    """The divergence times T squared, and its gradient, which is that of logits / T, times T."""
    T = terms.temperature
    scaled_MV = student_MV / T
    teacher_logs_MV = mean_log_probabilities(teachers, T, columns)
    student_logs_MV = scaled_MV - columns.log_sum(scaled_MV)[:, None]
    values_MV, derivatives_MV = _compare(student_logs_MV, teacher_logs_MV, terms.divergence)
    gradient_MV = derivatives_MV - student_logs_MV.exp() * columns.sum(derivatives_MV.sum(1))[:, None]
    return columns.sum(values_MV.sum(1)) * T**2, gradient_MV * T


def _top_divergence(student_MV: Tensor, top: Top, terms: Terms, columns: Columns) -> tuple[Tensor, Tensor]:
    """The same over K + 1 outcomes: the teachers' most likely tokens, and any other token."""
    T = terms.temperature
    ids_MK = top.ids_MK.long()
    scaled_MV = student_MV / T
    width = student_MV.shape[1]
    log_sum_M = columns.log_sum(scaled_MV)
    if columns.tensor is not None:  # one more column stands for the tokens of other ranks
        ids_MK = ids_MK - columns.begin
        ids_MK = ids_MK.where((ids_MK >= 0) & (ids_MK < width), width)
    wide_MV = scaled_MV if columns.tensor is None else F.pad(scaled_MV, (0, 1))
    chosen_MK = columns.sum(wide_MV.gather(1, ids_MK))
    others_MV = wide_MV.scatter(1, ids_MK, -torch.inf)[:, :width]
    others_M = columns.log_sum(others_MV)
    student_logs_ML = torch.cat([chosen_MK, others_M[:, None]], 1) - log_sum_M[:, None]
    values_ML, derivatives_ML = _compare(student_logs_ML, top.logs_ML.float(), terms.divergence)
    gradient_MV = (others_MV - others_M[:, None]).exp() * derivatives_ML[:, -1:]
    gradient_MV = gradient_MV - (scaled_MV - log_sum_M[:, None]).exp() * derivatives_ML.sum(1, keepdim=True)
    wide_MV = gradient_MV if columns.tensor is None else F.pad(gradient_MV, (0, 1))
    gradient_MV = wide_MV.scatter_add(1, ids_MK, derivatives_ML[:, :-1])[:, :width]
    return values_ML.sum(1) * T**2, gradient_MV * T


def _compare(student_logs: Tensor, teacher_logs: Tensor, divergence: str) -> tuple[Tensor, Tensor]:
    """What each outcome adds to the divergence of two log-distributions, and its derivative by the student's.

    A multiple of the student's probabilities may be added to the derivative: it adds nothing to the gradient of logits.
    """
    if divergence == "forward":
        return teacher_logs.exp() * (teacher_logs - student_logs), -teacher_logs.exp()
    if divergence == "reverse":
        values = student_logs.exp() * (student_logs - teacher_logs)
        return values, values
    mean_logs = torch.logaddexp(teacher_logs, student_logs) - math.log(2)
    student_half = student_logs.exp() * (student_logs - mean_logs) / 2
    return student_half + teacher_logs.exp() * (teacher_logs - mean_logs) / 2, student_half
