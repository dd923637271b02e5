"""What torch engines share: the losses of a batch and the groups that decay."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from textmill.models.nets_torch import Net, weights_of
from textmill.tokens.batches.batch import IGNORED, Batch


def on_device(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """An array on the device, without a wait where that is possible."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def token_shares(batch: Batch, loss: str) -> NDArray[np.float32]:
    """What each token's loss counts for, so that summing gives the step's loss.

    token_mean: one over all asked tokens of the global batch; sample_mean: one over the sample's asked tokens
    and over the samples that ask anything. A batch that asks nothing gives zeros.
    """
    asked = (batch.labels != IGNORED).astype(np.float32)
    counts = asked.sum(1, keepdims=True)
    samples = np.count_nonzero(counts) if loss == "sample_mean" else 1
    shared = np.maximum(counts, 1) if loss == "sample_mean" else max(1.0, counts.sum())
    shares: NDArray[np.float32] = (asked / (shared * max(1, samples))).astype(np.float32)
    return shares


def token_losses(net: Net, inputs: Tensor, labels: Tensor, keys_N: Tensor | None, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The loss of every token, 0 where nothing is asked, and the logits; documents are kept apart if given."""
    logits = net.logits(net(inputs, keys_N, documents_NT=documents)).float()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten().long(), ignore_index=IGNORED, reduction="none")
    return losses.view(labels.shape), logits


def decay_groups(net: Net, decay: float) -> list[dict[str, Any]]:
    """Two groups for the optimizer: matrices and embeddings decay, biases and LayerNorms do not."""
    members: dict[bool, list[Tensor]] = {True: [], False: []}
    for weight, parameter in weights_of(net).values():
        members[weight.decay].append(parameter)
    return [{"params": members[True], "weight_decay": decay}, {"params": members[False], "weight_decay": 0.0}]
