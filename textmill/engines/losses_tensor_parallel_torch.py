"""The head and its cross-entropy over a vocabulary that tensor-parallel ranks divide: no rank has the logits of another.

Shapes in names: M tokens, E width, V rows of the head that a rank has.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from textmill.engines.losses_torch import GradientInForward, chunks
from textmill.engines.tensor_parallel_torch import TensorParallel
from textmill.kernels.matmul_torch import product
from textmill.tokens.batches.batch import IGNORED


def tensor_parallel_loss(
    x_ME: Tensor,
    head_VE: Tensor,
    labels_M: Tensor,
    shares_M: Tensor,
    vocab: int,
    smoothing: float,
    z: float,
    tensor: TensorParallel,
) -> Tensor:
    """`summed_loss` over the rows of all ranks; backward starts here; the gradient of x is this rank's part of it."""
    loss: Tensor = _TensorParallelLoss.apply(x_ME, head_VE, labels_M, shares_M, vocab, smoothing, z, tensor, True)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def tensor_parallel_scores(
    x_ME: Tensor, head_VE: Tensor, labels_M: Tensor, vocab: int, tensor: TensorParallel
) -> tuple[Tensor, Tensor]:
    """The loss of each token, 0 where it has no label, and whether its label has the highest logit of all ranks."""
    head, begin = head_VE.to(x_ME.dtype), tensor.rank * len(head_VE)
    losses, right = [], []
    for rows in chunks(x_ME, head):
        logits_MV = (x_ME[rows] @ head.T)[:, : max(0, vocab - begin)].float()
        softmax = _Softmax(logits_MV, labels_M[rows], begin, vocab, tensor)
        asked = labels_M[rows] != IGNORED
        losses.append((softmax.spread_M - softmax.target_M).where(asked, 0))
        # The lowest of the columns with the highest logit, as argmax returns it on one process.
        top_M = (
            logits_MV.argmax(1) + begin
            if logits_MV.shape[1]
            else torch.full_like(labels_M[rows], vocab, dtype=torch.int64)
        )
        best_M = top_M.where(softmax.own_top_M == softmax.top_M, vocab)
        dist.all_reduce(best_M, dist.ReduceOp.MIN, group=tensor.group)
        right.append(best_M == labels_M[rows])
    return torch.cat(losses), torch.cat(right)


class _Softmax:
    """What ranks compute together for a chunk: the largest logit, the log of the denominator, the label's own logit."""

    def __init__(self, scores_MV: Tensor, labels_M: Tensor, begin: int, vocab: int, tensor: TensorParallel) -> None:
        self.places_M = labels_M.long() - begin
        self.here_M = (self.places_M >= 0) & (self.places_M < scores_MV.shape[1])
        self.places_M = self.places_M.where(self.here_M, 0)
        rows = len(scores_MV)
        self.own_top_M = scores_MV.amax(1) if scores_MV.shape[1] else scores_MV.new_full((rows,), -torch.inf)
        self.top_M = self.own_top_M.clone()
        dist.all_reduce(self.top_M, dist.ReduceOp.MAX, group=tensor.group)
        sums = (scores_MV - self.top_M[:, None]).exp().sum(1)
        targets = (
            scores_MV.gather(1, self.places_M[:, None])[:, 0].where(self.here_M, 0)
            if scores_MV.shape[1]
            else torch.zeros_like(sums)
        )
        self.sum_M, self.target_M, self.plain_M = tensor.all_reduce(torch.stack([sums, targets, scores_MV.sum(1)]))
        self.spread_M = self.top_M + self.sum_M.log()


class _TensorParallelLoss(GradientInForward):
    @staticmethod
    def forward(
        ctx: Any, x_ME: Tensor, head_VE: Tensor, labels_M: Tensor, shares_M: Tensor, vocab: int, smoothing: float, z: float, tensor: TensorParallel,
        ends: bool,
    ) -> Tensor:  # fmt: skip
        begin = tensor.rank * len(head_VE)

        def grade(rows: slice, head: Tensor) -> tuple[Tensor, Tensor]:
            logits_MV, labels, asked = product(x_ME[rows], head.T), labels_M[rows], labels_M[rows] != IGNORED
            scores_MV = logits_MV[:, : max(0, vocab - begin)].float()
            one, share_M = _Softmax(scores_MV, labels, begin, vocab, tensor), shares_M[rows].where(asked, 0)
            losses_M = (
                one.spread_M
                - (1 - smoothing) * one.target_M
                + z * one.spread_M.square()
                - smoothing * one.plain_M / vocab
            )
            gradients_MV = (scores_MV - one.spread_M[:, None]).exp() * (share_M * (1 + 2 * z * one.spread_M))[:, None]
            gradients_MV -= (share_M * (smoothing / vocab))[:, None]
            if gradients_MV.shape[1]:
                gradients_MV.scatter_add_(
                    1, one.places_M[:, None], (-(1 - smoothing) * share_M).where(one.here_M, 0)[:, None]
                )
            logits_MV.zero_()[:, : gradients_MV.shape[1]] = gradients_MV
            return (losses_M.where(asked, 0) * share_M).sum(), logits_MV

        return GradientInForward.compute(ctx, x_ME, head_VE, grade, ends)
