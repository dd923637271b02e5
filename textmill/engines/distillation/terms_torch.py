"""The terms of distillation. Those that compare logits are computed in chunks of tokens, so that all logits never exist
at once; their gradient is computed in forward, while a chunk's logits exist.

Shapes in names: M tokens, E width, V rows of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from textmill.config import TrainConfig
from textmill.engines.distillation.comparison_torch import Columns, Top, chunk_terms, top_of
from textmill.engines.distillation.sizes import chunk_tokens
from textmill.engines.distillation.terms import Terms, terms_of
from textmill.engines.losses_torch import GradientInForward, WeightedLabels, add_bias, token_chunks
from textmill.engines.tensor_parallel_torch import TensorParallel
from textmill.kernels.matmul_torch import matmul


class Prediction(NamedTuple):
    """What gives a teacher's logits: the input of its head, and the head."""

    x_ME: Tensor
    head_VE: Tensor
    bias_V: Tensor | None

    def logits(self, rows: slice, columns: slice) -> Tensor:
        """The logits of some tokens and some of the vocabulary."""
        bias_V = None if self.bias_V is None else self.bias_V[columns]
        return add_bias(matmul(self.x_ME[rows], self.head_VE[columns].T), bias_V)


class TeacherOutput(NamedTuple):
    """The teachers' predictions for a micro-batch: what gives their logits, or only their most likely tokens."""

    predictions: Sequence[Prediction]
    top: Top | None = None


def distillation_loss(
    x_ME: Tensor,
    head_VE: Tensor,
    labels: WeightedLabels,
    vocab: int,
    teachers: TeacherOutput,
    train: TrainConfig,
    report: Tensor,
    *,
    starts_backward: bool = False,
    bias_V: Tensor | None = None,
    compiled: bool = False,
    tensor: TensorParallel | None = None,
) -> Tensor:
    """The weighted sum of the labels' losses, and of the divergence and squared difference of logits.

    `report` [3] gets these three sums added, without the weights of the terms. Tokens without a label do not count.
    With `tensor`, the gradient of x is this rank's part of it.
    """
    columns = Columns(tensor.rank * len(head_VE) if tensor else 0, tensor)
    # A compiler cannot join collectives.
    comparison = _Comparison(terms_of(train), vocab, columns, compiled and tensor is None)
    loss: Tensor = _DistillationLoss.apply(  # type: ignore[no-untyped-call]
        x_ME, head_VE, labels, teachers, comparison, report, starts_backward, bias_V
    )
    return loss


class _Comparison(NamedTuple):
    """How the logits of student and teachers are compared."""

    terms: Terms
    vocab: int
    columns: Columns
    compiled: bool


class _DistillationLoss(GradientInForward):
    @staticmethod
    def forward(
        ctx: Any,
        x_ME: Tensor,
        head_VE: Tensor,
        labels: WeightedLabels,
        teachers: TeacherOutput,
        comparison: _Comparison,
        report: Tensor,
        starts_backward: bool,
        bias_V: Tensor | None,
    ) -> Tensor:
        terms, vocab, columns, compiled = comparison
        predictions = in_matmul_dtype(teachers.predictions)
        compute = _compiled_terms() if compiled else chunk_terms
        begin = columns.begin
        real = columns.count_real(len(head_VE), vocab)

        def compute_chunk(rows: slice, head: Tensor) -> tuple[Tensor, Tensor]:
            logits_MV = add_bias(matmul(x_ME[rows], head.T), bias_V)
            teacher_logits = []
            top = None
            if teachers.top is not None:
                top = Top(teachers.top.ids_MK[rows], teachers.top.logs_ML[rows])
            elif terms.top_k:
                top = top_of([prediction.logits(rows, slice(None))[:, :vocab] for prediction in predictions], terms)
            if predictions and (top is None or terms.mse):
                local_columns = slice(begin, begin + len(head))
                teacher_logits = [prediction.logits(rows, local_columns)[:, :real] for prediction in predictions]
            labels_M, weights_M, _ = labels.of_chunk(rows)
            sums, gradient_MV = compute(logits_MV, teacher_logits, top, labels_M, weights_M, vocab, terms, columns)
            report.add_(sums)
            return terms.labels * sums[0] + terms.kl * sums[1] + terms.mse * sums[2], gradient_MV

        chunk = chunk_tokens(vocab, compiled=compiled) if x_ME.is_cuda else None
        return GradientInForward.compute(ctx, x_ME, head_VE, compute_chunk, starts_backward, bias_V, chunk)


@lru_cache
def _compiled_terms() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(chunk_terms, dynamic=False)


def in_matmul_dtype(predictions: Sequence[Prediction]) -> list[Prediction]:
    """With heads in the precision of their inputs."""
    return [prediction._replace(head_VE=prediction.head_VE.to(prediction.x_ME.dtype)) for prediction in predictions]


@torch.no_grad()
def most_likely(predictions: Sequence[Prediction], vocab: int, train: TrainConfig) -> Top:
    """The teachers' most likely tokens at each token of a micro-batch."""
    terms = terms_of(train)
    x_ME = predictions[0].x_ME
    predictions = in_matmul_dtype(predictions)
    chunk = chunk_tokens(vocab, compiled=False) if x_ME.is_cuda else None
    tops = []
    for rows in token_chunks(x_ME, predictions[0].head_VE, chunk):
        logits = [prediction.logits(rows, slice(None))[:, :vocab] for prediction in predictions]
        tops.append(top_of(logits, terms))
    return Top(torch.cat([top.ids_MK for top in tops]), torch.cat([top.logs_ML for top in tops]))


def cosine_loss(student_ME: Tensor, teachers: Sequence[Tensor], weights_M: Tensor) -> Tensor:
    """The weighted sum of 1 - cosine between hidden states, the mean over the teachers."""
    student = student_ME.float()
    cosines = [torch.nn.functional.cosine_similarity(student, teacher_ME.float(), dim=1) for teacher_ME in teachers]
    return ((1 - torch.stack(cosines).mean(0)) * weights_M).sum()


def hidden_loss(student: Sequence[Tensor], teachers: Sequence[Sequence[Tensor]], weights_M: Tensor) -> Tensor:
    """The weighted sum of the mean squared difference of hidden states [M, E], the mean over blocks and teachers."""
    differences = []
    for teacher in teachers:
        for student_ME, teacher_ME in zip(student, teacher, strict=True):
            differences.append((student_ME.float() - teacher_ME.float()).square().mean(1))
    return (torch.stack(differences).mean(0) * weights_M).sum()
