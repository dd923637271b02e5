"""From a batch to micro-batches: which tokens have labels, how much the loss of each counts, and tensors on a device.

A masked model predicts few tokens, so its head is computed at these alone. Of two samples of 4 tokens with the labels
[[-, 7, -, 9], [5, -, -, -]] (- is -100) a micro-batch has, with K = 2:

    labels     [[7, 9], [5, -]]
    positions  [[1, 3], [4, 5]]    counted over all tokens of the micro-batch, so that sample 2 begins at 4

All but `MicroBatch`, `micro_batches` and `dropout_keys_of` is numpy, which the JAX engine uses too.

Shapes in names: N samples, T tokens, K labelled tokens of a sample, P labelled pairs of a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textmill.devices import copy_to_device
from textmill.engines import EvalSums
from textmill.errors import TextmillError
from textmill.kernels.dropout_torch import dropout_keys
from textmill.models import Shape, open_family
from textmill.models.base_torch import BaseNet, CompiledParts
from textmill.models.lora import uses_dropout
from textmill.processes.ranks import Ranks
from textmill.tokens.batches.batch import IGNORED, OPTIONAL_FIELDS, Batch

PAIR = "pair"
PAIR_LOSS = "pair_loss"
"""The name of the pair head in evaluations, and of its loss in the log of training."""
SIZES_PER_SAMPLE = 32
"""A sample's labelled positions are padded to one of this many sizes, so that few shapes are compiled."""


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


def count_pairs(batch: Batch) -> list[int]:
    """How many pairs have a label; empty if the batch has no labels of pairs."""
    return [] if batch.pair_labels is None else [int((batch.pair_labels != IGNORED).sum())]


def dropout_keys_of(net: BaseNet, seed: int, step: int, batch: Batch) -> NDArray[np.int64] | None:
    """The random key of each sample's dropout in this step; None if the net has no dropout."""
    if not uses_dropout(net.shape, net.lora):
        return None
    keys: NDArray[np.int64] = dropout_keys(seed, step, batch.samples).numpy()
    return keys


class MicroBatch(NamedTuple):
    """What a pass over a micro-batch reads."""

    inputs: Tensor
    labels: Tensor
    """[N, T], or [N, K] with `positions`."""
    weights: Tensor | None
    """The weight of each label's loss, in training."""
    keys: Tensor | None
    """Dropout keys of the samples."""
    documents: Tensor | None
    types: Tensor | None
    positions: Tensor | None
    """[N, K]: the tokens that `labels` are for, as indexes into all N x T tokens of the micro-batch; None: all."""
    pair_labels: Tensor | None
    """[N, P]."""
    pair_weights: Tensor | None
    pair_positions: Tensor | None
    """[N, P]: which of all tokens are the first ones of pairs."""

    def hidden_states(self, net: BaseNet, compiled: CompiledParts | None, **stage: Any) -> Tensor:
        """[N, T, E]: what the net computes for the heads; `stage` has `states_NTE` and `blocks` of a pipeline stage."""
        states: Tensor = net(
            self.inputs, self.keys, documents_NT=self.documents, compiled=compiled, types_NT=self.types, **stage
        )
        return states

    def scaled(self, scale: Tensor) -> MicroBatch:
        """With the weights of all losses multiplied by fp16's loss scale."""
        weights = {name: getattr(self, name) for name in ("weights", "pair_weights")}
        return self._replace(**{name: tensor * scale for name, tensor in weights.items() if tensor is not None})


def micro_batches(
    batch: Batch,
    net: BaseNet,
    size: int,
    device: torch.device,
    *,
    weights: NDArray[np.float32] | None = None,
    keys: NDArray[Any] | None = None,
    pair_weight: float = 0.0,
) -> Iterator[tuple[bool, MicroBatch]]:
    """Each micro-batch on the device, and whether it is the last.

    `pair_weight` is the weight of a pair's loss. A net with a pair head gets labels of pairs even if the batch has
    none, so that all its weights get a gradient on every rank.
    """
    pair_labels = batch.pair_labels
    if net.has_pair_head and pair_labels is None:
        pair_labels = np.full_like(batch.labels, IGNORED)
    for start in range(0, len(batch.inputs), size):
        rows = slice(start, start + size)
        arrays: dict[str, NDArray[Any] | None] = {
            "inputs": batch.inputs[rows],
            "keys": _take_rows(keys, rows),
            "documents": _take_rows(batch.documents, rows),
            "types": _take_rows(batch.types, rows),
        }
        labels = batch.labels[rows]
        label_weights = _take_rows(weights, rows)
        positions = None
        if net.head_for_labels_only:
            labels, label_weights, positions = _take_labelled(labels, label_weights)
        arrays |= {"labels": labels, "weights": label_weights, "positions": positions}
        pairs: tuple[NDArray[Any] | None, ...] = (None, None, None)
        if pair_labels is not None:
            pair_weights = np.where(pair_labels[rows] != IGNORED, np.float32(pair_weight), np.float32(0))
            pairs = _take_labelled(pair_labels[rows], pair_weights)
        arrays |= dict(zip(("pair_labels", "pair_weights", "pair_positions"), pairs, strict=True))
        tensors = {name: None if array is None else copy_to_device(array, device) for name, array in arrays.items()}
        is_last = rows.stop >= len(batch.inputs)
        yield is_last, MicroBatch(**tensors)  # type: ignore[arg-type]


def _take_rows(array: NDArray[Any] | None, rows: slice) -> NDArray[Any] | None:
    return None if array is None else array[rows]


def _take_labelled(
    labels_NT: NDArray[np.int32], weights_NT: NDArray[np.float32] | None
) -> tuple[NDArray[np.int32], NDArray[np.float32] | None, NDArray[np.int64]]:
    """The labels, their weights and their positions in the micro-batch, [N, K] each: only of labelled tokens."""
    N, T = labels_NT.shape
    order_NK = labelled_positions(labels_NT)
    weights_NK = None if weights_NT is None else np.take_along_axis(weights_NT, order_NK, 1)
    return np.take_along_axis(labels_NT, order_NK, 1), weights_NK, order_NK + np.arange(N)[:, None] * T


def labelled_positions(labels_NT: NDArray[np.int32], count: int | None = None) -> NDArray[np.int64]:
    """The positions [N, count] of each sample's labels, in order; default: `padded_count` of them.

    A sample with fewer labels is filled with positions that have none: with labels at 1 and 3 of 4 tokens and a count
    of 3, it is [1, 3, 0].
    """
    order_NT = np.argsort(labels_NT == IGNORED, axis=1, kind="stable")
    return order_NT[:, : padded_count(labels_NT) if count is None else count]


def padded_count(labels_NT: NDArray[np.int32]) -> int:
    """How many positions of each sample to compute: the most labels of any sample, rounded up to a multiple.

    In samples of 512 tokens, of which one has 70 labels, it is 80: a multiple of 512 / 32 = 16.
    """
    length: int = labels_NT.shape[1]
    most_labels = int((labels_NT != IGNORED).sum(1).max(initial=1))
    multiple = max(1, length // SIZES_PER_SAMPLE)
    return min(length, max(1, -(-most_labels // multiple)) * multiple)


def label_arrays(batch: Batch, few: bool, pairs: bool, ranks: Ranks) -> dict[str, NDArray[Any]]:
    """Labels and their positions for a program with fixed shapes, equal on all ranks.

    With `few`, only labelled tokens and their positions; with `pairs`, those of a pair head too.
    """
    arrays: dict[str, NDArray[Any]] = {"labels": batch.labels}
    if few:
        arrays["labels"], arrays["positions"] = _take_padded(batch.labels, ranks)
    if pairs:
        pair_labels = np.full_like(batch.labels, IGNORED) if batch.pair_labels is None else batch.pair_labels
        arrays["pair_labels"], arrays["pair_positions"] = _take_padded(pair_labels, ranks)
    return arrays


def _take_padded(labels_NT: NDArray[np.int32], ranks: Ranks) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The labels and their positions in each sample; as many of each sample on every rank."""
    count = max(ranks.all_gather(padded_count(labels_NT)))
    positions = labelled_positions(labels_NT, count).astype(np.int32)
    return np.take_along_axis(labels_NT, positions, 1), positions


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


def sums_of_all_ranks(sums: list[float], batch: Batch, ranks: Ranks, copies: int = 1) -> EvalSums:
    """The result of an evaluation from the sums of each rank's part of the batch; `copies` as in `count_labels`."""
    counts = [int((batch.labels != IGNORED).sum()), *count_pairs(batch)]
    totals = [total / copies for total in ranks.all_reduce([*sums, *counts])]
    loss_tokens, *pairs = (int(count) for count in totals[len(sums) :])
    return named_sums(totals[: len(sums)], loss_tokens, pairs)


def named_sums(totals: list[float], tokens: int, pairs: list[int]) -> EvalSums:
    """The result of an evaluation from totals over all ranks; pairs are left out if the batch has no labels of them."""
    others = {PAIR: EvalSums(totals[2], pairs[0], round(totals[3]))} if pairs else {}
    return EvalSums(totals[0], tokens, round(totals[1]), others)
