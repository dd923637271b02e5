"""The head and its cross-entropy over a vocabulary that tensor-parallel ranks divide, without gathering the logits.

Shapes in names: M tokens, E width, V rows of the head that a rank has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from textmill.engines.losses_torch import GradientInForward, LossFormula, WeightedLabels, add_bias, token_chunks
from textmill.engines.tensor_parallel_torch import TensorParallel
from textmill.kernels.matmul_torch import matmul
from textmill.tokens.batches.batch import IGNORED


def tensor_parallel_loss(
    x_ME: Tensor,
    head_VE: Tensor,
    labels: WeightedLabels,
    formula: LossFormula,
    tensor: TensorParallel,
    bias_V: Tensor | None = None,
) -> Tensor:
    """`summed_loss` over the rows of all ranks; backward starts here; the gradient of x is this rank's part of it."""
    loss: Tensor = _TensorParallelLoss.apply(  # type: ignore[no-untyped-call]
        x_ME, head_VE, labels, formula, tensor, True, bias_V
    )
    return loss


@torch.no_grad()
def tensor_parallel_loss_and_correct(
    x_ME: Tensor, head_VE: Tensor, labels_M: Tensor, vocab: int, tensor: TensorParallel, bias_V: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The loss of each token, 0 without a label, and whether its label has the highest logit of all ranks."""
    head = head_VE.to(x_ME.dtype)
    begin = tensor.rank * len(head_VE)
    losses = []
    correct = []
    for rows in token_chunks(x_ME, head):
        logits_MV = add_bias(x_ME[rows] @ head.T, bias_V)[:, : max(0, vocab - begin)].float()
        softmax = _Softmax(logits_MV, labels_M[rows], begin, tensor)
        labelled = labels_M[rows] != IGNORED
        losses.append((softmax.log_sum_M - softmax.target_M).where(labelled, 0))
        # The lowest of the columns with the highest logit, as argmax returns it on one process.
        top_M = (
            logits_MV.argmax(1) + begin
            if logits_MV.shape[1]
            else torch.full_like(labels_M[rows], vocab, dtype=torch.int64)
        )
        best_M = top_M.where(softmax.own_max_M == softmax.max_M, vocab)
        dist.all_reduce(best_M, dist.ReduceOp.MIN, group=tensor.group)
        correct.append(best_M == labels_M[rows])
    return torch.cat(losses), torch.cat(correct)


class _Softmax:
    """What ranks compute together for a chunk: the largest logit, the log of the denominator, the label's own logit."""

    def __init__(self, logits_MV: Tensor, labels_M: Tensor, begin: int, tensor: TensorParallel) -> None:
        self.columns_M = labels_M.long() - begin
        self.here_M = (self.columns_M >= 0) & (self.columns_M < logits_MV.shape[1])
        self.columns_M = self.columns_M.where(self.here_M, 0)
        rows = len(logits_MV)
        self.own_max_M = logits_MV.amax(1) if logits_MV.shape[1] else logits_MV.new_full((rows,), -torch.inf)
        self.max_M = self.own_max_M.clone()
        dist.all_reduce(self.max_M, dist.ReduceOp.MAX, group=tensor.group)
        sums = (logits_MV - self.max_M[:, None]).exp().sum(1)
        targets = (
            logits_MV.gather(1, self.columns_M[:, None])[:, 0].where(self.here_M, 0)
            if logits_MV.shape[1]
            else torch.zeros_like(sums)
        )
        totals = tensor.all_reduce(torch.stack([sums, targets, logits_MV.sum(1)]))
        self.sum_M, self.target_M, self.logits_sum_M = totals
        self.log_sum_M = self.max_M + self.sum_M.log()


class _TensorParallelLoss(GradientInForward):
    @staticmethod
    def forward(
        ctx: Any,
        x_ME: Tensor,
        head_VE: Tensor,
        labels: WeightedLabels,
        formula: LossFormula,
        tensor: TensorParallel,
        starts_backward: bool,
        bias_V: Tensor | None,
    ) -> Tensor:
        begin = tensor.rank * len(head_VE)
        vocab, smoothing, z, _ = formula

        def compute_chunk(rows: slice, head: Tensor) -> tuple[Tensor, Tensor]:
            full_MV = add_bias(matmul(x_ME[rows], head.T), bias_V)
            labels_M, weights_M, _ = labels.of_chunk(rows)
            labelled = labels_M != IGNORED
            logits_MV = full_MV[:, : max(0, vocab - begin)].float()
            softmax = _Softmax(logits_MV, labels_M, begin, tensor)
            weight_M = weights_M.where(labelled, 0)
            log_sum_M = softmax.log_sum_M
            losses_M = (
                log_sum_M
                - (1 - smoothing) * softmax.target_M
                + z * log_sum_M.square()
                - smoothing * softmax.logits_sum_M / vocab
            )
            gradients_MV = (logits_MV - log_sum_M[:, None]).exp() * (weight_M * (1 + 2 * z * log_sum_M))[:, None]
            gradients_MV -= (weight_M * (smoothing / vocab))[:, None]
            if gradients_MV.shape[1]:
                gradients_MV.scatter_add_(
                    1, softmax.columns_M[:, None], (-(1 - smoothing) * weight_M).where(softmax.here_M, 0)[:, None]
                )
            full_MV.zero_()[:, : gradients_MV.shape[1]] = gradients_MV
            return (losses_M.where(labelled, 0) * weight_M).sum(), full_MV

        return GradientInForward.compute(ctx, x_ME, head_VE, compute_chunk, starts_backward, bias_V)
