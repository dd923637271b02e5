"""What torch engines share: Triton kernels, the weight of each token in the loss, attention backends, the net's hidden states."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from textmill.kernels.availability import lacking
from textmill.models.base_torch import BaseNet
from textmill.models.execution_torch import EAGER, Execution
from textmill.tokens.batches.batch import IGNORED, Batch


def kernels(module: str) -> Any:
    """A module of Triton kernels, or None where none can be built; without a GPU neither is imported."""
    return None if lacking() else import_module(module)


def attention_order(device: torch.device) -> AbstractContextManager[Any]:
    """The order of attention backends: cuDNN first, the fastest for training where it supports the shapes."""
    if device.type != "cuda":
        return nullcontext()
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kernels, set_priority=True)


def count_loss_tokens(batch: Batch) -> tuple[int, int]:
    """How many tokens have a label, and how many samples have such a token."""
    labelled = batch.labels != IGNORED
    return int(labelled.sum()), int(np.count_nonzero(labelled.any(1)))


def token_weights(batch: Batch, loss: str, loss_tokens: int, loss_samples: int) -> NDArray[np.float32]:
    """The weight of each token's loss, so that the sum over all ranks is the step's loss; both counts are the global batch's.

    token_mean: one over all loss tokens; sample_mean: one over the sample's loss tokens and over the samples that have any.
    A batch without labels gives zeros.
    """
    labelled = (batch.labels != IGNORED).astype(np.float32)
    counts = labelled.sum(1, keepdims=True)
    samples = loss_samples if loss == "sample_mean" else 1
    divisor = np.maximum(counts, 1) if loss == "sample_mean" else np.float32(max(1, loss_tokens))
    weights: NDArray[np.float32] = (labelled / (divisor * max(1, samples))).astype(np.float32)
    return weights


def part_of(batch: Batch, ranks: int, rank: int) -> Batch:
    """One of several parts of a batch, all of one size: rows without labels fill up the last ones."""
    if ranks == 1:
        return batch
    rows = -(-len(batch.inputs) // ranks)
    mine = np.arange(rank * rows, (rank + 1) * rows)
    real, mine = mine < len(batch.inputs), np.minimum(mine, len(batch.inputs) - 1)
    labels = np.where(real[:, None], batch.labels[mine], np.int32(IGNORED))
    return Batch(
        batch.inputs[mine], labels, batch.samples[mine], None if batch.documents is None else batch.documents[mine]
    )


def hidden_states(
    net: BaseNet,
    inputs_NT: Tensor,
    keys_N: Tensor | None,
    documents_NT: Tensor | None,
    precision: torch.dtype,
    execution: Execution = EAGER,
) -> Tensor:
    """The net's last hidden states [tokens, width], in the precision of the matmuls; attention stays inside documents if given."""
    states: Tensor = net(inputs_NT, keys_N, documents_NT=documents_NT, execution=execution)
    return states.to(precision).flatten(0, 1)
