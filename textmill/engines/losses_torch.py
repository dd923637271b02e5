"""From the net to the loss of a micro-batch: the cross-entropy of the head, that of a pair head, or that of a finetuned
head.

Engines call `forward_heads(net, micro_batch, ...)`, which runs the net, then `training_loss` or, in evaluation, `sums`.
The head and its cross-entropy are computed in chunks of tokens, so that all logits never exist at once, and the
gradient in forward, while a chunk's logits exist: `summed_loss` for training, `loss_and_correct` for evaluation. Where
tensor-parallel ranks divide the vocabulary, the logits are not gathered.

Shapes in names: N samples, T tokens, K labels of a sample, M tokens, E width, C classes, V padded vocabulary, or the
rows of it that a rank has. A head may have a bias, one number for each row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from textmill.config import DistilConfig, TrainConfig
from textmill.config.own_files import is_own_file, load_part
from textmill.engines.micro_batches import PAIR_LOSS, MicroBatch
from textmill.engines.tensor_parallel_torch import TensorParallel
from textmill.errors import TextmillError
from textmill.kernels.cross_entropy_triton import cross_entropy_and_correct, cross_entropy_with_gradient
from textmill.kernels.fp8_torch import fp8_matmul, quantize_rows
from textmill.kernels.matmul_torch import matmul, matmul_into
from textmill.kernels.triton_support import can_run_kernels
from textmill.models.base_torch import BaseNet, CompiledParts
from textmill.tokens.batches.batch import IGNORED

if TYPE_CHECKING:
    from textmill.engines.distillation_torch import Teachers

AUXILIARY_LOSS = "auxiliary_loss"
LOSS_TOLERANCE = 1e-3
"""Largest relative difference between losses that must be equal, in `check_own_loss`."""
CPU_LOGITS = 1 << 24
"""Logits of a chunk on a CPU."""
GPU_TOKENS = 32768
"""Tokens of a chunk on a GPU: enough to fill it, in full waves of tiles."""


def forward_heads(
    net: BaseNet,
    micro_batch: MicroBatch,
    precision: torch.dtype,
    compiled: CompiledParts | None = None,
    teachers: Teachers | None = None,
    states_NTE: Tensor | None = None,
) -> HeadStates | LabelStates:
    """Run the net on a micro-batch, up to the input of its heads; call it under autocast.

    `states_NTE` are its hidden states, if a pipeline has computed them."""
    with teachers.collect_student(net) if teachers else nullcontext([]) as hidden:
        if states_NTE is None:
            states_NTE = micro_batch.hidden_states(net, compiled)
    states_NTE = states_NTE.to(precision)
    if net.has_label_head:
        return LabelStates(net, micro_batch, states_NTE)
    return HeadStates(net, micro_batch, states_NTE, compiled, teachers, hidden)


class HeadStates:
    """The hidden states of a micro-batch that the heads read, and the losses computed from them."""

    def __init__(
        self,
        net: BaseNet,
        micro_batch: MicroBatch,
        states_NTE: Tensor,
        compiled: CompiledParts | None,
        teachers: Teachers | None,
        hidden: list[Tensor],
    ) -> None:
        """`hidden` are the states after the blocks that the teachers compare."""
        self.net = net
        self.micro_batch = micro_batch
        self.compiled = compiled
        self.teachers = teachers
        self.hidden = hidden
        # A part of the step's loss, as large as the micro-batch's part of the labels.
        self.auxiliary_loss: Tensor | None = None
        if net.has_auxiliary_loss and micro_batch.weights is not None:
            self.auxiliary_loss = net.take_auxiliary_loss() * micro_batch.weights.sum()
        x_ME = states_NTE.flatten(0, 1)
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
        self.x_ME = net.head_input(x_ME).to(x_ME.dtype)

    def training_loss(
        self, train: TrainConfig, tensor: TensorParallel | None, *, gradient_is_one: bool
    ) -> tuple[Tensor, Tensor]:
        """The loss for the backward pass, and what to report: the labels' loss, and all of `term_names` behind it.

        Tensor-parallel ranks each compute a part of the gradient, so each has a part of the pairs' loss.
        """
        terms: list[Tensor] = []
        if self.teachers:
            loss, label_loss, terms = self.teachers.training_loss(self, train, tensor, gradient_is_one)
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
        return summed_loss(
            self.x_ME,
            net.head,
            self.weighted_labels(),
            net.shape.vocab,
            smoothing=train.label_smoothing,
            bias_V=net.head_bias,
            tensor=tensor,
            fp8=net.fp8,
            gradient_is_one=gradient_is_one,
        )

    def weighted_labels(self) -> WeightedLabels:
        """The labels whose logits `x_ME` gives."""
        micro_batch = self.micro_batch
        assert micro_batch.weights is not None
        return WeightedLabels(micro_batch.labels.flatten(), micro_batch.weights.flatten())

    def sums(self, tensor: TensorParallel | None = None) -> list[Tensor]:
        """The summed loss and the number of correct predictions; also those of the pairs, if there is a pair head."""
        net = self.net
        labels_M = self.micro_batch.labels.flatten()
        losses, correct = loss_and_correct(self.x_ME, net.head, labels_M, net.shape.vocab, net.head_bias, tensor)
        sums = [losses.sum(), correct.sum()]
        if self.pair_losses is not None and self.pair_correct is not None:
            sums += [self.pair_losses.sum(), self.pair_correct.sum()]
        return sums


class LabelStates:
    """The losses of a net with a head for labels, such as a finetuned BERT; to be computed under autocast."""

    def __init__(self, net: BaseNet, micro_batch: MicroBatch, states_NTE: Tensor) -> None:
        assert micro_batch.positions is not None
        self.micro_batch = micro_batch
        logits_NKC = net.label_logits(
            states_NTE, micro_batch.positions, micro_batch.documents, micro_batch.keys
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
    vocab: int,
    *,
    smoothing: float = 0.0,
    bias_V: Tensor | None = None,
    tensor: TensorParallel | None = None,
    fp8: bool = False,
    gradient_is_one: bool = False,
) -> Tensor:
    """The weighted sum of the labelled tokens' losses, with label smoothing as in torch's cross_entropy.

    The columns of the logits, and the rows of the head, from `vocab` on are padding. With `tensor` the head has this
    rank's rows, and the gradient of x is this rank's part of it. With `fp8` the logits are an fp8 matmul; their
    gradient stays in bf16, since rounding so wide a matrix would need another pass.
    `gradient_is_one`: this loss is what `backward` is called on, so its gradient is 1.
    """
    with torch.no_grad():
        head8 = quantize_rows(head_VE) if fp8 else None

    def compute_chunk(rows: slice, head: Tensor) -> tuple[Tensor, Tensor]:
        logits_MV = fp8_matmul(quantize_rows(x_ME[rows]), head8) if head8 else matmul(x_ME[rows], head.T)
        logits_MV = add_bias(logits_MV, bias_V)
        chunk_labels = labels.of_chunk(rows)
        if tensor:
            losses_M = divided_loss_and_gradient(logits_MV, chunk_labels, vocab, smoothing, tensor)
        else:
            losses_M = label_loss_and_gradient(logits_MV, chunk_labels, vocab, smoothing)
        return (losses_M * chunk_labels.weights_M).sum(), logits_MV

    return loss_by_chunks(x_ME, head_VE, bias_V, compute_chunk, gradient_is_one)


def loss_by_chunks(
    x_ME: Tensor,
    head_VE: Tensor,
    bias_V: Tensor | None,
    compute_chunk: Callable[[slice, Tensor], tuple[Tensor, Tensor]],
    gradient_is_one: bool,
    chunk: int | None = None,
) -> Tensor:
    """The sum over chunks; `compute_chunk` gets rows and the head, and returns their loss and logit gradients.

    `chunk` is the most tokens of a chunk, if it is not to be as large as usual.
    """
    loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        x_ME, head_VE, bias_V, compute_chunk, gradient_is_one, chunk
    )
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """`loss_by_chunks`, with the gradients of hidden states, head and bias computed in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ME: Tensor,
        head_VE: Tensor,
        bias_V: Tensor | None,
        compute_chunk: Callable[[slice, Tensor], tuple[Tensor, Tensor]],
        gradient_is_one: bool,
        chunk: int | None,
    ) -> Tensor:
        ctx.gradient_is_one = gradient_is_one
        head = head_VE.to(x_ME.dtype)
        grad_x = torch.empty_like(x_ME)
        grad_head = (
            torch.zeros(head.shape, dtype=head_VE.dtype, device=head.device) if ctx.needs_input_grad[1] else None
        )
        grad_bias = torch.zeros_like(bias_V) if bias_V is not None and ctx.needs_input_grad[2] else None
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
        return *gradients, None, None, None


@torch.no_grad()
def loss_and_correct(
    x_ME: Tensor,
    head_VE: Tensor,
    labels_M: Tensor,
    vocab: int,
    bias_V: Tensor | None = None,
    tensor: TensorParallel | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each token, 0 without a label, and whether its label has the highest logit (of all ranks)."""
    head = head_VE.to(x_ME.dtype)
    losses = []
    correct = []
    for rows in token_chunks(x_ME, head):
        logits_MV = add_bias(x_ME[rows] @ head.T, bias_V)
        if tensor:
            chunk = _divided_loss_and_correct(logits_MV, labels_M[rows], vocab, tensor)
        else:
            chunk = _chunk_loss_and_correct(logits_MV, labels_M[rows], vocab)
        losses.append(chunk[0])
        correct.append(chunk[1])
    return torch.cat(losses), torch.cat(correct)


def add_bias(logits_MV: Tensor, bias_V: Tensor | None) -> Tensor:
    """Add the head's bias, if it has one, in place."""
    return logits_MV if bias_V is None else logits_MV.add_(bias_V.to(logits_MV.dtype))


def token_chunks(x_ME: Tensor, head_VE: Tensor, most: int | None = None) -> list[slice]:
    """The rows of each chunk."""
    rows = most or tokens_of_chunk(head_VE)
    return [slice(start, start + rows) for start in range(0, len(x_ME), rows)]


def tokens_of_chunk(head_VE: Tensor) -> int:
    """The tokens whose logits are computed at a time."""
    return GPU_TOKENS if head_VE.is_cuda else max(1, CPU_LOGITS // len(head_VE))


def label_loss_and_gradient(logits_MV: Tensor, labels: WeightedLabels, vocab: int, smoothing: float) -> Tensor:
    """The loss of each row; overwrites the logits with the gradient of the weighted sum."""
    labels_M, weights_M = labels
    if can_run_kernels(logits_MV):
        return cross_entropy_with_gradient(logits_MV, labels_M, weights_M, vocab, smoothing)
    real = logits_MV[:, :vocab]
    values = real.float() if real.dtype.itemsize < 4 else real
    labelled_M = labels_M != IGNORED
    targets_M1 = labels_M.where(labelled_M, 0).long()[:, None]
    log_sum_M1 = values.logsumexp(1, keepdim=True)
    losses_M1 = log_sum_M1 - (1 - smoothing) * values.gather(1, targets_M1)
    if smoothing:
        losses_M1 -= smoothing * values.mean(1, keepdim=True)
    weight_M1 = weights_M.where(labelled_M, 0)[:, None].to(values.dtype)
    values.sub_(log_sum_M1).exp_().mul_(weight_M1)
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


def _divided_loss_and_correct(
    logits_MV: Tensor, labels_M: Tensor, vocab: int, tensor: TensorParallel
) -> tuple[Tensor, Tensor]:
    begin = tensor.rank * logits_MV.shape[1]
    logits_MV = logits_MV[:, : max(0, vocab - begin)].float()
    softmax = _Softmax(logits_MV, labels_M, begin, tensor)
    # The lowest of the columns with the highest logit, as argmax returns it on one process.
    top_M = logits_MV.argmax(1) + begin if logits_MV.shape[1] else torch.full_like(labels_M, vocab, dtype=torch.int64)
    best_M = top_M.where(softmax.own_max_M == softmax.max_M, vocab)
    dist.all_reduce(best_M, dist.ReduceOp.MIN, group=tensor.group)
    return (softmax.log_sum_M - softmax.target_M).where(labels_M != IGNORED, 0), best_M == labels_M


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


def divided_loss_and_gradient(
    logits_MV: Tensor, labels: WeightedLabels, vocab: int, smoothing: float, tensor: TensorParallel
) -> Tensor:
    """`label_loss_and_gradient` for this rank's columns of the logits."""
    labels_M, weights_M = labels
    begin = tensor.rank * logits_MV.shape[1]
    labelled = labels_M != IGNORED
    real_MV = logits_MV[:, : max(0, vocab - begin)].float()
    softmax = _Softmax(real_MV, labels_M, begin, tensor)
    weight_M = weights_M.where(labelled, 0)
    log_sum_M = softmax.log_sum_M
    losses_M: Tensor = log_sum_M - (1 - smoothing) * softmax.target_M - smoothing * softmax.logits_sum_M / vocab
    gradients_MV = (real_MV - log_sum_M[:, None]).exp() * weight_M[:, None]
    gradients_MV -= (weight_M * (smoothing / vocab))[:, None]
    if gradients_MV.shape[1]:
        gradients_MV.scatter_add_(
            1, softmax.columns_M[:, None], (-(1 - smoothing) * weight_M).where(softmax.here_M, 0)[:, None]
        )
    logits_MV.zero_()[:, : gradients_MV.shape[1]] = gradients_MV
    return losses_M.where(labelled, 0)


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
