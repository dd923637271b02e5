"""The head and its cross-entropy in one: by pieces of a batch, so that its logits are never held.

Shapes in names: M tokens, E width, V padded vocabulary. The gradient is made with the loss, while a piece's logits are at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from textmill.engines.shared_torch import kernels
from textmill.kernels.fp8_torch import product8, rows8
from textmill.kernels.matmul_torch import multiply, product
from textmill.tokens.batches.batch import IGNORED

KERNELS = "textmill.kernels.cross_entropy_triton"
CPU_SCORES = 1 << 24
"""Logits at a time on a CPU."""
GPU_ROWS = 32768
"""Tokens at a time on a GPU: enough to fill it, and waves of tiles that end together."""


def summed_loss(
    x_ME: Tensor, head_VE: Tensor, labels_M: Tensor, shares_M: Tensor, vocab: int, smoothing: float = 0.0, z: float = 0.0,
    fp8: bool = False, *, ends: bool = False,
) -> Tensor:  # fmt: skip
    """The sum of each asked token's loss times its share, 0 or more; rows of the head from `vocab` on have no part.

    `smoothing` is label smoothing as in torch's cross_entropy; `z` weighs the square of the log of the softmax's denominator. With `fp8`
    the scores are an fp8 product; their gradient, too wide a matrix to be rounded in a pass of its own, is worked on in bf16. `ends`
    says that backward begins here: gradients stand as they are made.
    """
    loss: Tensor = _SummedLoss.apply(x_ME, head_VE, labels_M, shares_M, vocab, smoothing, z, fp8, ends)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def scored(x_ME: Tensor, head_VE: Tensor, labels_M: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """The loss of each token, 0 where nothing is asked, and whether its label has the highest score."""
    head = head_VE.to(x_ME.dtype)
    parts = [_score(x_ME[rows] @ head.T, labels_M[rows], vocab) for rows in pieces(x_ME, head)]
    return torch.cat([losses for losses, _ in parts]), torch.cat([right for _, right in parts])


class MadeInForward(torch.autograd.Function):
    """A loss whose gradients, of the states and of the head, are made with it, piece by piece, while the scores are at hand."""

    @staticmethod
    def made(
        ctx: Any, x_ME: Tensor, head_VE: Tensor, graded: Callable[[slice, Tensor], tuple[Tensor, Tensor]], ends: bool
    ) -> Tensor:
        """The sum over pieces; `graded` gives a piece's loss and the gradient of its scores, by a head in the precision of the states."""
        ctx.ends = ends
        head = head_VE.to(x_ME.dtype)
        slope_x = torch.empty_like(x_ME)
        slope_head = (
            torch.zeros(head.shape, dtype=head_VE.dtype, device=head.device) if ctx.needs_input_grad[1] else None
        )
        total = torch.zeros((), device=x_ME.device)
        for rows in pieces(x_ME, head):
            loss, slopes_MV = graded(rows, head)
            total += loss
            multiply(slopes_MV, head, slope_x[rows])
            if slope_head is not None:
                multiply(slopes_MV.T, x_ME[rows], slope_head, onto=slope_head)
        ctx.save_for_backward(slope_x, slope_head)
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        slope_x, slope_head = ctx.saved_tensors
        if not ctx.ends:
            slope_x, slope_head = slope_x.mul_(slope), None if slope_head is None else slope_head.mul_(slope)
        return slope_x, slope_head, None, None, None, None, None, None, None


class _SummedLoss(MadeInForward):
    @staticmethod
    def forward(
        ctx: Any, x_ME: Tensor, head_VE: Tensor, labels_M: Tensor, shares_M: Tensor, vocab: int, smoothing: float, z: float, fp8: bool,
        ends: bool,
    ) -> Tensor:  # fmt: skip
        head8 = rows8(head_VE) if fp8 else None

        def graded(rows: slice, head: Tensor) -> tuple[Tensor, Tensor]:
            logits_MV = product8(rows8(x_ME[rows]), head8) if head8 else product(x_ME[rows], head.T)
            losses_M = _grade(logits_MV, labels_M[rows], shares_M[rows], vocab, smoothing, z)
            return (losses_M * shares_M[rows]).sum(), logits_MV

        return MadeInForward.made(ctx, x_ME, head_VE, graded, ends)


def pieces(x_ME: Tensor, head_VE: Tensor) -> list[slice]:
    rows = GPU_ROWS if x_ME.is_cuda else max(1, CPU_SCORES // len(head_VE))
    return [slice(start, start + rows) for start in range(0, len(x_ME), rows)]


def _grade(logits_MV: Tensor, labels_M: Tensor, shares_M: Tensor, vocab: int, smoothing: float, z: float) -> Tensor:
    """The loss of each row; the logits become the gradient of their sum by shares."""
    if logits_MV.is_cuda and (fused := kernels(KERNELS)) is not None:
        losses: Tensor = fused.grade(logits_MV, labels_M, shares_M, vocab, smoothing, z)
        return losses
    real = logits_MV[:, :vocab]
    scores = real.float() if real.dtype.itemsize < 4 else real
    asked_M = labels_M != IGNORED
    targets_M1 = labels_M.where(asked_M, 0).long()[:, None]
    spread_M1 = scores.logsumexp(1, keepdim=True)
    losses_M1 = spread_M1 - (1 - smoothing) * scores.gather(1, targets_M1) + z * spread_M1.square()
    if smoothing:
        losses_M1 -= smoothing * scores.mean(1, keepdim=True)
    share_M1 = shares_M.where(asked_M, 0)[:, None].to(scores.dtype)
    scores.sub_(spread_M1).exp_().mul_(share_M1 * (1 + 2 * z * spread_M1))
    if smoothing:
        scores.sub_(share_M1 * (smoothing / vocab))
    scores.scatter_add_(1, targets_M1, -(1 - smoothing) * share_M1)
    if scores is not real:
        real.copy_(scores)
    logits_MV[:, vocab:] = 0
    return losses_M1[:, 0].where(asked_M, 0)


def _score(logits_MV: Tensor, labels_M: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    if logits_MV.is_cuda and (fused := kernels(KERNELS)) is not None:
        both: tuple[Tensor, Tensor] = fused.score(logits_MV, labels_M, vocab)
        return both
    scores = logits_MV[:, :vocab].float()
    losses_M = torch.nn.functional.cross_entropy(scores, labels_M.long(), ignore_index=IGNORED, reduction="none")
    return losses_M, scores.argmax(1) == labels_M
