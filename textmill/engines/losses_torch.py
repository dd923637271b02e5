"""The head and its cross-entropy, computed in chunks of tokens, so that all logits never exist at once.

The gradient is computed in forward, while a chunk's logits exist. `summed_loss` is for training, `loss_and_correct` for
evaluation; each has a variant for a vocabulary that tensor-parallel ranks divide, which does not gather the logits.

Shapes in names: M tokens, E width, V padded vocabulary, or the rows of it that a rank has. A head may have a bias, one
number for each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from textmill.engines.tensor_parallel_torch import TensorParallel
from textmill.kernels.cross_entropy_triton import cross_entropy_and_correct, cross_entropy_with_gradient
from textmill.kernels.fp8_torch import fp8_matmul, quantize_rows
from textmill.kernels.matmul_torch import matmul, matmul_into
from textmill.kernels.triton_support import can_run_kernels
from textmill.tokens.batches.batch import IGNORED

CPU_LOGITS = 1 << 24
"""Logits of a chunk on a CPU."""
GPU_TOKENS = 32768
"""Tokens of a chunk on a GPU: enough to fill it, in full waves of tiles."""


class LossFormula(NamedTuple):
    """How the loss of a token follows from its logits and its label."""

    vocab: int
    """The columns of the logits, and the rows of the head, from this one on are padding."""
    smoothing: float = 0.0
    """Label smoothing as in torch's cross_entropy."""
    z: float = 0.0
    """The weight of z-loss, the square of the log of the softmax's denominator."""


class WeightedLabels(NamedTuple):
    """What to predict at each token, and how much each loss counts."""

    labels_M: Tensor
    weights_M: Tensor
    """0 or more."""

    def of_chunk(self, rows: slice) -> WeightedLabels:
        """Those of some tokens."""
        return WeightedLabels(self.labels_M[rows], self.weights_M[rows])


def summed_loss(
    x_ME: Tensor,
    head_VE: Tensor,
    labels: WeightedLabels,
    formula: LossFormula,
    *,
    bias_V: Tensor | None = None,
    fp8: bool = False,
    gradient_is_one: bool = False,
) -> Tensor:
    """The weighted sum of the labelled tokens' losses.

    With `fp8` the logits are an fp8 matmul; their gradient stays in bf16, since rounding so wide a matrix would need
    another pass. `gradient_is_one`: this loss is what `backward` is called on, so its gradient is 1.
    """
    loss: Tensor = _SummedLoss.apply(  # type: ignore[no-untyped-call]
        x_ME, head_VE, labels, formula, fp8, gradient_is_one, bias_V
    )
    return loss


@torch.no_grad()
def loss_and_correct(
    x_ME: Tensor, head_VE: Tensor, labels_M: Tensor, vocab: int, bias_V: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The loss of each token, 0 without a label, and whether its label has the highest logit."""
    head = head_VE.to(x_ME.dtype)
    chunks = [
        _chunk_loss_and_correct(add_bias(x_ME[rows] @ head.T, bias_V), labels_M[rows], vocab)
        for rows in token_chunks(x_ME, head)
    ]
    return torch.cat([losses for losses, _ in chunks]), torch.cat([correct for _, correct in chunks])


def add_bias(logits_MV: Tensor, bias_V: Tensor | None) -> Tensor:
    """Add the head's bias, if it has one, in place."""
    return logits_MV if bias_V is None else logits_MV.add_(bias_V.to(logits_MV.dtype))


class GradientInForward(torch.autograd.Function):
    """A loss that computes the gradients of hidden states and head in forward, while a chunk's logits exist.

    The first two arguments of `apply` are these, and the last is the head's bias or None.
    """

    @staticmethod
    def compute(
        ctx: Any,
        x_ME: Tensor,
        head_VE: Tensor,
        compute_chunk: Callable[[slice, Tensor], tuple[Tensor, Tensor]],
        gradient_is_one: bool,
        bias_V: Tensor | None,
        chunk: int | None = None,
    ) -> Tensor:
        """The sum over chunks; `compute_chunk` gets rows and the head, and returns their loss and logit gradients.

        `chunk` is the most tokens of a chunk, if it is not to be as large as usual.
        """
        ctx.gradient_is_one = gradient_is_one
        head = head_VE.to(x_ME.dtype)
        grad_x = torch.empty_like(x_ME)
        grad_head = (
            torch.zeros(head.shape, dtype=head_VE.dtype, device=head.device) if ctx.needs_input_grad[1] else None
        )
        grad_bias = torch.zeros_like(bias_V) if bias_V is not None and ctx.needs_input_grad[-1] else None
        total = torch.zeros((), device=x_ME.device)
        for rows in token_chunks(x_ME, head, chunk):
            loss, grad_MV = compute_chunk(rows, head)
            total += loss
            matmul_into(grad_MV, head, grad_x[rows])
            if grad_head is not None:
                matmul_into(grad_MV.T, x_ME[rows], grad_head, addend=grad_head)
            if grad_bias is not None:
                grad_bias += grad_MV.sum(0, dtype=grad_bias.dtype)
        ctx.save_for_backward(grad_x, grad_head, grad_bias)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients: tuple[Tensor | None, ...] = ctx.saved_tensors
        if not ctx.gradient_is_one:
            gradients = tuple(None if one is None else one.mul_(gradient) for one in gradients)
        grad_x, grad_head, grad_bias = gradients
        return grad_x, grad_head, *[None] * (len(ctx.needs_input_grad) - 3), grad_bias


class _SummedLoss(GradientInForward):
    @staticmethod
    def forward(
        ctx: Any,
        x_ME: Tensor,
        head_VE: Tensor,
        labels: WeightedLabels,
        formula: LossFormula,
        fp8: bool,
        gradient_is_one: bool,
        bias_V: Tensor | None,
    ) -> Tensor:
        head8 = quantize_rows(head_VE) if fp8 else None

        def compute_chunk(rows: slice, head: Tensor) -> tuple[Tensor, Tensor]:
            logits_MV = fp8_matmul(quantize_rows(x_ME[rows]), head8) if head8 else matmul(x_ME[rows], head.T)
            logits_MV = add_bias(logits_MV, bias_V)
            chunk_labels = labels.of_chunk(rows)
            losses_M = label_loss_and_gradient(logits_MV, chunk_labels, formula)
            return (losses_M * chunk_labels.weights_M).sum(), logits_MV

        return GradientInForward.compute(ctx, x_ME, head_VE, compute_chunk, gradient_is_one, bias_V)


def token_chunks(x_ME: Tensor, head_VE: Tensor, most: int | None = None) -> list[slice]:
    """The rows of each chunk."""
    rows = most or tokens_of_chunk(head_VE)
    return [slice(start, start + rows) for start in range(0, len(x_ME), rows)]


def tokens_of_chunk(head_VE: Tensor) -> int:
    """The tokens whose logits are computed at a time."""
    return GPU_TOKENS if head_VE.is_cuda else max(1, CPU_LOGITS // len(head_VE))


def label_loss_and_gradient(logits_MV: Tensor, labels: WeightedLabels, formula: LossFormula) -> Tensor:
    """The loss of each row; overwrites the logits with the gradient of the weighted sum."""
    labels_M, weights_M = labels
    vocab, smoothing, z = formula
    if can_run_kernels(logits_MV):
        return cross_entropy_with_gradient(logits_MV, labels_M, weights_M, vocab, smoothing, z)
    real = logits_MV[:, :vocab]
    values = real.float() if real.dtype.itemsize < 4 else real
    labelled_M = labels_M != IGNORED
    targets_M1 = labels_M.where(labelled_M, 0).long()[:, None]
    log_sum_M1 = values.logsumexp(1, keepdim=True)
    losses_M1 = log_sum_M1 - (1 - smoothing) * values.gather(1, targets_M1) + z * log_sum_M1.square()
    if smoothing:
        losses_M1 -= smoothing * values.mean(1, keepdim=True)
    weight_M1 = weights_M.where(labelled_M, 0)[:, None].to(values.dtype)
    values.sub_(log_sum_M1).exp_().mul_(weight_M1 * (1 + 2 * z * log_sum_M1))
    if smoothing:
        values.sub_(weight_M1 * (smoothing / vocab))
    values.scatter_add_(1, targets_M1, -(1 - smoothing) * weight_M1)
    if values is not real:
        real.copy_(values)
    logits_MV[:, vocab:] = 0
    return losses_M1[:, 0].where(labelled_M, 0)


def _chunk_loss_and_correct(logits_MV: Tensor, labels_M: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    if can_run_kernels(logits_MV):
        return cross_entropy_and_correct(logits_MV, labels_M, vocab)
    values = logits_MV[:, :vocab].float()
    losses_M = torch.nn.functional.cross_entropy(values, labels_M.long(), ignore_index=IGNORED, reduction="none")
    return losses_M, values.argmax(1) == labels_M


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
        gradient_is_one: bool,
        bias_V: Tensor | None,
    ) -> Tensor:
        begin = tensor.rank * len(head_VE)
        vocab, smoothing, z = formula

        def compute_chunk(rows: slice, head: Tensor) -> tuple[Tensor, Tensor]:
            full_MV = add_bias(matmul(x_ME[rows], head.T), bias_V)
            labels_M, weights_M = labels.of_chunk(rows)
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

        return GradientInForward.compute(ctx, x_ME, head_VE, compute_chunk, gradient_is_one, bias_V)
