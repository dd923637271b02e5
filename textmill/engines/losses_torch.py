"""The head and its cross-entropy in one, by chunks of a batch, so that all logits never exist at once.

Shapes in names: M tokens, E width, V padded vocabulary. The gradient is computed with the loss, while a chunk's logits exist.
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
CPU_LOGITS = 1 << 24
"""Logits at a time on a CPU."""
GPU_ROWS = 32768
"""Tokens at a time on a GPU: enough to fill it, and waves of tiles that end together."""


def summed_loss(
    x_ME: Tensor, head_VE: Tensor, labels_M: Tensor, weights_M: Tensor, vocab: int, smoothing: float = 0.0, z: float = 0.0,
    fp8: bool = False, *, ends: bool = False,
) -> Tensor:  # fmt: skip
    """The sum of each labelled token's loss times its weight, 0 or more; rows of the head from `vocab` on are padding.

    `smoothing` is label smoothing as in torch's cross_entropy; `z` weighs the square of the log of the softmax's denominator. With `fp8`
    the logits are an fp8 matmul; their gradient, too wide a matrix to be rounded in a pass of its own, stays in bf16. `ends` says that
    backward starts here: gradients are used as they are.
    """
    loss: Tensor = _SummedLoss.apply(x_ME, head_VE, labels_M, weights_M, vocab, smoothing, z, fp8, ends)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def scored(x_ME: Tensor, head_VE: Tensor, labels_M: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """The loss of each token, 0 where it has no label, and whether its label has the highest logit."""
    head = head_VE.to(x_ME.dtype)
    parts = [_score(x_ME[rows] @ head.T, labels_M[rows], vocab) for rows in chunks(x_ME, head)]
    return torch.cat([losses for losses, _ in parts]), torch.cat([right for _, right in parts])


class GradientInForward(torch.autograd.Function):
    """A loss whose gradients, of the hidden states and of the head, are computed in forward, chunk by chunk, while the logits exist."""

    @staticmethod
    def compute(
        ctx: Any, x_ME: Tensor, head_VE: Tensor, grade: Callable[[slice, Tensor], tuple[Tensor, Tensor]], ends: bool
    ) -> Tensor:
        """The sum over chunks; `grade` returns a chunk's loss and the gradient of its logits, for a head in the precision of the states."""
        ctx.ends = ends
        head = head_VE.to(x_ME.dtype)
        grad_x = torch.empty_like(x_ME)
        grad_head = (
            torch.zeros(head.shape, dtype=head_VE.dtype, device=head.device) if ctx.needs_input_grad[1] else None
        )
        total = torch.zeros((), device=x_ME.device)
        for rows in chunks(x_ME, head):
            loss, grad_MV = grade(rows, head)
            total += loss
            multiply(grad_MV, head, grad_x[rows])
            if grad_head is not None:
                multiply(grad_MV.T, x_ME[rows], grad_head, onto=grad_head)
        ctx.save_for_backward(grad_x, grad_head)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_head = ctx.saved_tensors
        if not ctx.ends:
            grad_x, grad_head = grad_x.mul_(gradient), None if grad_head is None else grad_head.mul_(gradient)
        return grad_x, grad_head, None, None, None, None, None, None, None


class _SummedLoss(GradientInForward):
    @staticmethod
    def forward(
        ctx: Any, x_ME: Tensor, head_VE: Tensor, labels_M: Tensor, weights_M: Tensor, vocab: int, smoothing: float, z: float, fp8: bool,
        ends: bool,
    ) -> Tensor:  # fmt: skip
        head8 = rows8(head_VE) if fp8 else None

        def grade(rows: slice, head: Tensor) -> tuple[Tensor, Tensor]:
            logits_MV = product8(rows8(x_ME[rows]), head8) if head8 else product(x_ME[rows], head.T)
            losses_M = _grade(logits_MV, labels_M[rows], weights_M[rows], vocab, smoothing, z)
            return (losses_M * weights_M[rows]).sum(), logits_MV

        return GradientInForward.compute(ctx, x_ME, head_VE, grade, ends)


def chunks(x_ME: Tensor, head_VE: Tensor) -> list[slice]:
    rows = GPU_ROWS if x_ME.is_cuda else max(1, CPU_LOGITS // len(head_VE))
    return [slice(start, start + rows) for start in range(0, len(x_ME), rows)]


def _grade(logits_MV: Tensor, labels_M: Tensor, weights_M: Tensor, vocab: int, smoothing: float, z: float) -> Tensor:
    """The loss of each row; the logits become the gradient of their weighted sum."""
    if logits_MV.is_cuda and (fused := kernels(KERNELS)) is not None:
        losses: Tensor = fused.grade(logits_MV, labels_M, weights_M, vocab, smoothing, z)
        return losses
    real = logits_MV[:, :vocab]
    scores = real.float() if real.dtype.itemsize < 4 else real
    labelled_M = labels_M != IGNORED
    targets_M1 = labels_M.where(labelled_M, 0).long()[:, None]
    spread_M1 = scores.logsumexp(1, keepdim=True)
    losses_M1 = spread_M1 - (1 - smoothing) * scores.gather(1, targets_M1) + z * spread_M1.square()
    if smoothing:
        losses_M1 -= smoothing * scores.mean(1, keepdim=True)
    weight_M1 = weights_M.where(labelled_M, 0)[:, None].to(scores.dtype)
    scores.sub_(spread_M1).exp_().mul_(weight_M1 * (1 + 2 * z * spread_M1))
    if smoothing:
        scores.sub_(weight_M1 * (smoothing / vocab))
    scores.scatter_add_(1, targets_M1, -(1 - smoothing) * weight_M1)
    if scores is not real:
        real.copy_(scores)
    logits_MV[:, vocab:] = 0
    return losses_M1[:, 0].where(labelled_M, 0)


def _score(logits_MV: Tensor, labels_M: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    if logits_MV.is_cuda and (fused := kernels(KERNELS)) is not None:
        both: tuple[Tensor, Tensor] = fused.score(logits_MV, labels_M, vocab)
        return both
    scores = logits_MV[:, :vocab].float()
    losses_M = torch.nn.functional.cross_entropy(scores, labels_M.long(), ignore_index=IGNORED, reduction="none")
    return losses_M, scores.argmax(1) == labels_M
