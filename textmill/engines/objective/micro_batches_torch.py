"""MicroBatch: the tensors of some samples, with only the labelled positions where the net's heads need no others.

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
    """[N, K]: which of all tokens of the micro-batch, counted through, `labels` are for."""
    pair_labels: Tensor | None
    """[N, P]."""
    pair_weights: Tensor | None
    pair_positions: Tensor | None
    """[N, P]: which of all tokens are the first ones of pairs."""
    teacher_ids: Tensor | None = None
    """[N, T, K]: the teachers' most likely tokens, if they are cached."""
    teacher_logs: Tensor | None = None

    def scaled(self, scale: Tensor) -> MicroBatch:
        """With the weights of all losses multiplied by fp16's loss scale."""
        names = [name for name in ("weights", "pair_weights") if getattr(self, name) is not None]
        return self._replace(**{name: getattr(self, name) * scale for name in names})


def micro_batches(
    batch: Batch, net: BaseNet, size: int, device: torch.device, *, weights: NDArray[np.float32] | None = None,
    keys: NDArray[Any] | None = None, pair_weight: float = 0.0,
) -> Iterator[tuple[bool, MicroBatch]]:  # fmt: skip
    """Each micro-batch on the device, and whether it is the last.

    `pair_weight` is the weight of a pair's loss. A net with a pair head gets labels of pairs even if the batch has
    none, so that all its weights get a gradient on every rank.
    """
    pair_labels = batch.pair_labels
    if net.has_pair_head and pair_labels is None:
        pair_labels = np.full_like(batch.labels, IGNORED)
    for start in range(0, len(batch.inputs), size):
        rows = slice(start, start + size)
        labels, weight = batch.labels[rows], None if weights is None else weights[rows]
        arrays: dict[str, NDArray[Any] | None] = {
            "inputs": batch.inputs[rows],
            "keys": None if keys is None else keys[rows],
            "documents": None if batch.documents is None else batch.documents[rows],
            "types": None if batch.types is None else batch.types[rows],
            "teacher_ids": None if batch.teacher_ids is None else batch.teacher_ids[rows],
            "teacher_logs": None if batch.teacher_logs is None else batch.teacher_logs[rows],
            **_gather(labels, {"weights": weight}, few=net.few_labels, prefix=""),
        }
        pairs: dict[str, NDArray[Any] | None] = dict.fromkeys(("pair_labels", "pair_weights", "pair_positions"))
        if pair_labels is not None:
            weight = np.where(pair_labels[rows] != IGNORED, np.float32(pair_weight), np.float32(0))
            pairs = _gather(pair_labels[rows], {"pair_weights": weight}, few=True, prefix="pair_")
        tensors = {
            name: None if array is None else copy_to_device(array, device)
            for name, array in {**arrays, **pairs}.items()
        }
        yield rows.stop >= len(batch.inputs), MicroBatch(**tensors)  # type: ignore[arg-type]


def _gather(
    labels_NT: NDArray[np.int32], others: dict[str, NDArray[Any] | None], *, few: bool, prefix: str
) -> dict[str, NDArray[Any] | None]:
    """The labels and their weights; if there are few, only those, with their positions."""
    if not few:
        return {f"{prefix}labels": labels_NT, **others, f"{prefix}positions": None}
    order_NK = labelled_positions(labels_NT)
    found = {f"{prefix}labels": labels_NT, **others}
    taken = {name: None if one is None else np.take_along_axis(one, order_NK, 1) for name, one in found.items()}
    return {**taken, f"{prefix}positions": order_NK + np.arange(len(labels_NT))[:, None] * labels_NT.shape[1]}
