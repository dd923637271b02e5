"""MicroBatch: the tensors of some samples, with only the labelled positions where the net's heads need no others.

A masked model predicts few tokens, so its head is computed at these alone. Of two samples of 4 tokens with the labels
[[-, 7, -, 9], [5, -, -, -]] (- is -100) the micro-batch has, with K = 2:

    labels     [[7, 9], [5, -]]
    positions  [[1, 3], [4, 5]]    counted over all tokens of the micro-batch, so that sample 2 begins at 4

Shapes in names: N samples, T tokens, K labelled tokens of a sample, P labelled pairs of a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textmill.engines.objective.labels import labelled_positions
from textmill.kernels.transfer_torch import copy_to_device
from textmill.models.base_torch import BaseNet
from textmill.models.execution_torch import Execution
from textmill.tokens.batches.batch import IGNORED, Batch


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
    teacher_ids: Tensor | None = None
    """[N, T, K]: the teachers' most likely tokens, if they are cached."""
    teacher_logs: Tensor | None = None
    multi_token_labels: Tensor | None = None
    """[N, T]: the token after each label, with `train.multi_token`."""
    multi_token_weights: Tensor | None = None

    def hidden_states(self, net: BaseNet, execution: Execution) -> Tensor:
        """[N, T, E]: what the net computes for the heads."""
        states: Tensor = net(
            self.inputs, self.keys, documents_NT=self.documents, execution=execution, types_NT=self.types
        )
        return states

    def scaled(self, scale: Tensor) -> MicroBatch:
        """With the weights of all losses multiplied by fp16's loss scale."""
        weights = {name: getattr(self, name) for name in ("weights", "pair_weights", "multi_token_weights")}
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
            "teacher_ids": _take_rows(batch.teacher_ids, rows),
            "teacher_logs": _take_rows(batch.teacher_logs, rows),
        }
        labels = batch.labels[rows]
        label_weights = _take_rows(weights, rows)
        positions = None
        if batch.multi_token_weight is not None and label_weights is not None:
            arrays |= _multi_token_labels(labels, label_weights, batch.multi_token_weight)
        if net.few_labels:
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


def _multi_token_labels(
    labels_NT: NDArray[np.int32], weights_NT: NDArray[np.float32], factor: float
) -> dict[str, NDArray[Any] | None]:
    """The label after each label of a sample, and its weight; [5 6 - 7 8] gives [6 - - 8 -]."""
    next_NT = np.full_like(labels_NT, IGNORED)
    next_NT[:, :-1] = np.where(labels_NT[:, :-1] == IGNORED, IGNORED, labels_NT[:, 1:])
    next_weights_NT = np.where(next_NT == IGNORED, np.float32(0), weights_NT * np.float32(factor))
    return {"multi_token_labels": next_NT, "multi_token_weights": next_weights_NT}


def _take_labelled(
    labels_NT: NDArray[np.int32], weights_NT: NDArray[np.float32] | None
) -> tuple[NDArray[np.int32], NDArray[np.float32] | None, NDArray[np.int64]]:
    """The labels, their weights and their positions in the micro-batch, [N, K] each: only of labelled tokens."""
    N, T = labels_NT.shape
    order_NK = labelled_positions(labels_NT)
    weights_NK = None if weights_NT is None else np.take_along_axis(weights_NT, order_NK, 1)
    return np.take_along_axis(labels_NT, order_NK, 1), weights_NK, order_NK + np.arange(N)[:, None] * T
