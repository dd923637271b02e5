"""What the engines share: attention backends, counts and weights of labels, dropout keys, parts of a batch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel

from textmill.engines import Ranks, Sums
from textmill.engines.objective.labels import count_pairs, named_sums
from textmill.errors import TextmillError
from textmill.kernels.dropout_torch import dropout_keys
from textmill.models import Shape, open_family
from textmill.models.base_torch import BaseNet
from textmill.models.lora import uses_dropout
from textmill.tokens.batches.batch import IGNORED, OPTIONAL_FIELDS, Batch


def attention_order(device: torch.device) -> AbstractContextManager[Any]:
    """The order of attention backends: cuDNN first, the fastest for training where it supports the shapes."""
    if device.type != "cuda":
        return nullcontext()
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(backends, set_priority=True)


def check_fields(batch: Batch, shape: Shape) -> None:
    """Raise an error if the batch has a field that the model family does not use: it would be dropped silently."""
    fields = open_family(shape.family).BATCH_FIELDS
    unused = [name for name in OPTIONAL_FIELDS if getattr(batch, name) is not None and name not in fields]
    if unused:
        raise TextmillError(
            f"the batches have {', '.join(unused)}, which the model family {shape.family} does not use; "
            "change train.layout, or name the field in the family's BATCH_FIELDS"
        )
    if batch.pair_labels is not None and not getattr(shape, "pair_head", False):
        raise TextmillError(
            "the batches have labels of sentence pairs, but the model has no pair head; set model.shape.pair_head=true "
            "for a new model, or batches without pairs"
        )


def count_labels(batch: Batch, ranks: Ranks, copies: int = 1) -> tuple[int, int, list[int]]:
    """Of the global batch: tokens with a label, samples that have such a token, and `count_pairs`.

    `copies` is how many ranks have the same samples, which would otherwise be counted as often.
    """
    labelled = batch.labels != IGNORED
    counts = [int(labelled.sum()), int(np.count_nonzero(labelled.any(1))), *count_pairs(batch)]
    tokens, samples, *pairs = (int(count) // copies for count in ranks.all_reduce(counts))
    return tokens, samples, pairs


def sums_of_all_ranks(sums: list[float], batch: Batch, ranks: Ranks, copies: int = 1) -> Sums:
    """The result of an evaluation from the sums of each rank's part of the batch; `copies` as in `count_labels`."""
    counts = [int((batch.labels != IGNORED).sum()), *count_pairs(batch)]
    totals = [total / copies for total in ranks.all_reduce([*sums, *counts])]
    loss_tokens, *pairs = (int(count) for count in totals[len(sums) :])
    return named_sums(totals[: len(sums)], loss_tokens, pairs)


def token_weights(batch: Batch, loss: str, loss_tokens: int, loss_samples: int) -> NDArray[np.float32]:
    """The weight of each token's loss, so that the sum over all ranks is the step's loss.

    token_mean: 1 / loss tokens; sample_mean: 1 / (loss tokens of the sample x samples with loss). `loss_tokens` and
    `loss_samples` are those of the global batch. A batch without labels has weights of zero. With the labels [[5 6 7 -]
    [8 - - -]] on a single rank, the weights are 1/4 everywhere, or by sample_mean 1/6 and 1/2.
    """
    labelled = (batch.labels != IGNORED).astype(np.float32)
    if loss == "sample_mean":
        tokens_of_sample = np.maximum(labelled.sum(1, keepdims=True), 1)
        divisor = tokens_of_sample * max(1, loss_samples)
    else:
        divisor = np.float32(max(1, loss_tokens))
    weights: NDArray[np.float32] = (labelled / divisor).astype(np.float32)
    return weights


def dropout_keys_of(net: BaseNet, seed: int, step: int, batch: Batch) -> NDArray[np.int64] | None:
    """The random key of each sample's dropout in this step; None if the net has no dropout."""
    if not uses_dropout(net.shape, net.lora):
        return None
    keys: NDArray[np.int64] = dropout_keys(seed, step, batch.samples).numpy()
    return keys


def part_of(batch: Batch, ranks: int, rank: int) -> Batch:
    """A rank's part of a batch; all parts have one size, and the last ones are padded with rows without labels.

    Of 5 samples, two ranks have samples 0 1 2 and 3 4 4, the last 4 without labels.
    """
    if ranks == 1:
        return batch
    samples = len(batch.inputs)
    size = -(-samples // ranks)
    rows = np.arange(rank * size, (rank + 1) * size)
    is_sample = rows < samples
    rows = np.minimum(rows, samples - 1)
    fields = {name: values[rows] for name, values in vars(batch).items() if values is not None}
    for name in fields.keys() & {"labels", "pair_labels"}:
        fields[name] = np.where(is_sample[:, None], fields[name], np.int32(IGNORED))
    return Batch(**fields)
