"""Distillation in torch: the teachers, frozen nets whose predictions and hidden states are targets of training, and the
terms of the loss that compare with them.

Terms that compare logits are computed in chunks of tokens, so that all logits never exist at once; their gradient is
computed in forward, by formula, while a chunk's logits exist.

With the student's logits s, the mean of the teachers' distributions p and a temperature T, the divergence is
T^2 KL(p || softmax(s / T)). Its gradient by s is T (softmax(s / T) - p).

Shapes in names: N samples, T tokens, M labelled tokens, E width, V rows of the head or columns of the vocabulary that a
rank has. `chunk_terms` changes nothing in place, so that a compiler can join it into a few passes over the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from textmill.config import TrainConfig
from textmill.devices import autocast
from textmill.engines.distillation import check_teacher, chunk_tokens, matched_layers, teacher_folder
from textmill.engines.losses_torch import HeadStates, WeightedLabels, add_bias, loss_by_chunks
from textmill.engines.micro_batches import MicroBatch
from textmill.engines.tensor_parallel_torch import TensorParallel
from textmill.kernels.matmul_torch import matmul
from textmill.models import Shape
from textmill.models.base_torch import BaseNet, CompiledParts
from textmill.models.nets_torch import open_net
from textmill.tokens.batches.batch import IGNORED


class Targets(NamedTuple):
    """What the teachers computed for a micro-batch's labelled tokens."""

    predictions: list[Prediction]
    states: list[Tensor]
    """The last hidden states of each teacher, [M, E]."""
    hidden: list[list[Tensor]]
    """The hidden states of each teacher after the blocks of `train.distil.teacher_layers`, [M, E] each."""


class Teachers:
    """The teachers of a run on one device."""

    def __init__(self, train: TrainConfig, shape: Shape, device: torch.device, precision: torch.dtype) -> None:
        self.distil = train.distil
        self.precision = precision
        self.nets = [open_net(teacher_folder(name), device) for name in train.distil.teachers]
        for name, net in zip(train.distil.teachers, self.nets, strict=True):
            net.requires_grad_(False)
            check_teacher(name, net.shape, shape, train)
        layers = [len(net.blocks) for net in self.nets]
        self.layers = [matched_layers(self.distil, shape.layers, count)[1] for count in layers]
        self.student_layers = matched_layers(self.distil, shape.layers, layers[0])[0]

    def collect_student(self, net: BaseNet) -> AbstractContextManager[list[Tensor]]:
        """A list that gets the student's hidden states, which are compared, while its net runs."""
        return collect_blocks(net, self.student_layers)

    def training_loss(
        self, heads: HeadStates, train: TrainConfig, tensor: TensorParallel | None, gradient_is_one: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The loss for the backward pass, the labels' loss, and the teachers' terms, these two without weights."""
        net = heads.net
        distil = train.distil
        targets = self.read(heads.micro_batch, heads.compiled)
        labels = heads.weighted_labels()
        sums = labels.weights_M.new_zeros(3)
        loss = distillation_loss(
            heads.x_ME,
            net.head,
            labels,
            net.shape.vocab,
            targets.predictions,
            train,
            sums,
            gradient_is_one=gradient_is_one,
            bias_V=net.head_bias,
            compiled=heads.compiled is not None,
            tensor=tensor,
        )
        label_loss, kl, mse = sums
        terms = {"kl": kl, "mse": mse}
        if distil.cosine:
            terms["cosine"] = cosine_loss(heads.states_ME, targets.states, labels.weights_M)
            loss = loss + distil.cosine / (tensor.count if tensor else 1) * terms["cosine"]
        if distil.hidden:
            student_states = [take_labelled(states, heads.micro_batch) for states in heads.hidden]
            terms["hidden"] = hidden_loss(student_states, targets.hidden, labels.weights_M)
            loss = loss + distil.hidden * terms["hidden"]
        return loss, label_loss, [terms[name].detach() for name in distil.terms]

    @torch.no_grad()
    def read(self, micro_batch: MicroBatch, compiled: CompiledParts | None = None) -> Targets:
        """The targets of a micro-batch."""
        outputs = [
            self._read(net, micro_batch, layers, compiled) for net, layers in zip(self.nets, self.layers, strict=True)
        ]
        predictions, states, hidden = (list(column) for column in zip(*outputs, strict=True))
        return Targets(predictions, states, hidden)

    def _read(
        self, net: BaseNet, micro_batch: MicroBatch, layers: Sequence[int], compiled: CompiledParts | None
    ) -> tuple[Prediction, Tensor, list[Tensor]]:
        with autocast(micro_batch.inputs.device, self.precision), collect_blocks(net, layers) as hidden:
            states_NTE = net(
                micro_batch.inputs, documents_NT=micro_batch.documents, types_NT=micro_batch.types, compiled=compiled
            )
            states_ME = take_labelled(states_NTE.to(self.precision), micro_batch)
            x_ME = net.head_input(states_ME).to(self.precision)
        return Prediction(x_ME, net.head, net.head_bias), states_ME, [take_labelled(one, micro_batch) for one in hidden]


def open_teachers(train: TrainConfig, shape: Shape, device: torch.device, precision: torch.dtype) -> Teachers | None:
    """The teachers of a run; None if it has none."""
    return Teachers(train, shape, device, precision) if train.distil.teachers else None


def take_labelled(states_NTE: Tensor, micro_batch: MicroBatch) -> Tensor:
    """The hidden states as [M, E]: of all tokens, or of those that the micro-batch has labels for."""
    states_ME = states_NTE.flatten(0, 1)
    return states_ME if micro_batch.positions is None else states_ME.index_select(0, micro_batch.positions.flatten())


@contextmanager
def collect_blocks(net: BaseNet, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """A list that gets the hidden states after these blocks while the net runs."""
    states_by_layer: dict[int, Tensor] = {}
    ordered: list[Tensor] = []
    handles = []
    for layer in dict.fromkeys(layers):
        handles.append(net.blocks[layer].register_forward_hook(partial(_keep, states_by_layer, layer)))
    try:
        yield ordered
    finally:
        for handle in handles:
            handle.remove()
        ordered += [states_by_layer[layer] for layer in layers if layer in states_by_layer]


def _keep(states: dict[int, Tensor], layer: int, module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
    states[layer] = out


def distillation_loss(
    x_ME: Tensor,
    head_VE: Tensor,
    labels: WeightedLabels,
    vocab: int,
    teachers: Sequence[Prediction],
    train: TrainConfig,
    report: Tensor,
    *,
    gradient_is_one: bool = False,
    bias_V: Tensor | None = None,
    compiled: bool = False,
    tensor: TensorParallel | None = None,
) -> Tensor:
    """The weighted sum of the labels' losses, and of the divergence and squared difference of logits.

    `report` [3] gets these three sums added, without the weights of the terms. Tokens without a label do not count.
    With `tensor`, the gradient of x is this rank's part of it.
    """
    distil = train.distil
    terms = Terms(distil.labels, distil.kl, distil.mse, distil.temperature, train.label_smoothing)
    columns = Columns(tensor.rank * len(head_VE) if tensor else 0, tensor)
    compiled = compiled and tensor is None  # a compiler cannot join collectives
    # With heads in the precision of their inputs.
    predictions = [one._replace(head_VE=one.head_VE.to(one.x_ME.dtype)) for one in teachers]
    compute = _compiled_terms() if compiled else chunk_terms
    local_columns = slice(columns.begin, columns.begin + len(head_VE))
    real = columns.count_real(len(head_VE), vocab)

    def compute_chunk(rows: slice, head: Tensor) -> tuple[Tensor, Tensor]:
        logits_MV = add_bias(matmul(x_ME[rows], head.T), bias_V)
        teacher_logits = [prediction.logits(rows, local_columns)[:, :real] for prediction in predictions]
        labels_M, weights_M = labels.of_chunk(rows)
        sums, gradient_MV = compute(logits_MV, teacher_logits, labels_M, weights_M, vocab, terms, columns)
        report.add_(sums)
        return terms.labels * sums[0] + terms.kl * sums[1] + terms.mse * sums[2], gradient_MV

    chunk = chunk_tokens(vocab, compiled=compiled) if x_ME.is_cuda else None
    return loss_by_chunks(x_ME, head_VE, bias_V, compute_chunk, gradient_is_one, chunk)


class Terms(NamedTuple):
    """The settings of the terms that compare logits, as plain values, which compilers can read."""

    labels: float
    kl: float
    mse: float
    temperature: float
    smoothing: float


class Prediction(NamedTuple):
    """What gives a teacher's logits: the input of its head, and the head."""

    x_ME: Tensor
    head_VE: Tensor
    bias_V: Tensor | None

    def logits(self, rows: slice, columns: slice) -> Tensor:
        """The logits of some tokens and some of the vocabulary."""
        bias_V = None if self.bias_V is None else self.bias_V[columns]
        return add_bias(matmul(self.x_ME[rows], self.head_VE[columns].T), bias_V)


@lru_cache
def _compiled_terms() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(chunk_terms, dynamic=False)


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
        divergence_M, kl_gradient_MV = _divergence(student_MV, teachers, terms, columns)
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
    losses_M = log_sum_M - (1 - terms.smoothing) * label_logit_M
    if terms.smoothing:
        losses_M = losses_M - terms.smoothing * columns.sum(student_MV.sum(1)) / vocab
    gradient_MV = (student_MV - log_sum_M[:, None]).exp()
    gradient_MV = gradient_MV - is_label_MV * (1 - terms.smoothing) - terms.smoothing / vocab
    return losses_M.where(labelled_M, 0), gradient_MV * labelled_M[:, None]


def mean_log_probabilities(teachers: Sequence[Tensor], temperature: float, columns: Columns = ALL_COLUMNS) -> Tensor:
    """The log of the mean of the teachers' distributions at a temperature."""
    scaled = [logits_MV.float() / temperature for logits_MV in teachers]
    logs = [logits_MV - columns.log_sum(logits_MV)[:, None] for logits_MV in scaled]
    return logs[0] if len(logs) == 1 else torch.stack(logs).logsumexp(0) - math.log(len(logs))


def _divergence(
    student_MV: Tensor, teachers: Sequence[Tensor], terms: Terms, columns: Columns
) -> tuple[Tensor, Tensor]:
    """The divergence times T squared, and its gradient, which is that of logits / T, times T."""
    T = terms.temperature
    scaled_MV = student_MV / T
    teacher_logs_MV = mean_log_probabilities(teachers, T, columns)
    student_logs_MV = scaled_MV - columns.log_sum(scaled_MV)[:, None]
    teacher_MV = teacher_logs_MV.exp()
    values_MV = teacher_MV * (teacher_logs_MV - student_logs_MV)
    gradient_MV = student_logs_MV.exp() * columns.sum(teacher_MV.sum(1))[:, None] - teacher_MV
    return columns.sum(values_MV.sum(1)) * T**2, gradient_MV * T
