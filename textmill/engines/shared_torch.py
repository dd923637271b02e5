"""What torch engines share: kernels of our own, what each token counts for, which attention is asked first, the net's states."""

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
from textmill.models.blockwise_torch import PLAIN, Parts
from textmill.models.nets_torch import Net
from textmill.tokens.batches.batch import IGNORED, Batch


def kernels(module: str) -> Any:
    """A module of Triton kernels, or nothing where none can be built; who has no GPU does not ask, and loads neither."""
    return None if lacking() else import_module(module)


def attention_order(device: torch.device) -> AbstractContextManager[Any]:
    """Which attention kernels are asked first: cuDNN's, the fastest for training where it can do the work."""
    if device.type != "cuda":
        return nullcontext()
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kernels, set_priority=True)


def asked_of(batch: Batch) -> tuple[int, int]:
    """How many tokens are asked, and how many samples ask anything."""
    asked = batch.labels != IGNORED
    return int(asked.sum()), int(np.count_nonzero(asked.any(1)))


def token_shares(batch: Batch, loss: str, asked_tokens: int, asking_samples: int) -> NDArray[np.float32]:
    """What each token's loss counts for, so that summing over all processes gives the step's loss; both counts are the global batch's.

    token_mean: one over all asked tokens; sample_mean: one over the sample's asked tokens and over the samples that ask
    anything. A batch that asks nothing gives zeros.
    """
    asked = (batch.labels != IGNORED).astype(np.float32)
    counts = asked.sum(1, keepdims=True)
    samples = asking_samples if loss == "sample_mean" else 1
    shared = np.maximum(counts, 1) if loss == "sample_mean" else np.float32(max(1, asked_tokens))
    shares: NDArray[np.float32] = (asked / (shared * max(1, samples))).astype(np.float32)
    return shares


def part_of(batch: Batch, ways: int, number: int) -> Batch:
    """One of several parts of a batch, all of one size: rows that ask nothing fill up the last ones."""
    if ways == 1:
        return batch
    rows = -(-len(batch.inputs) // ways)
    mine = np.arange(number * rows, (number + 1) * rows)
    real, mine = mine < len(batch.inputs), np.minimum(mine, len(batch.inputs) - 1)
    labels = np.where(real[:, None], batch.labels[mine], np.int32(IGNORED))
    return Batch(
        batch.inputs[mine], labels, batch.samples[mine], None if batch.documents is None else batch.documents[mine]
    )


def hidden_states(
    net: Net,
    inputs_NT: Tensor,
    keys_N: Tensor | None,
    documents_NT: Tensor | None,
    precision: torch.dtype,
    parts: Parts = PLAIN,
) -> Tensor:
    """The net's last states [tokens, width], in the precision of the products; documents are kept apart if given."""
    return net(inputs_NT, keys_N, documents_NT=documents_NT, parts=parts).to(precision).flatten(0, 1)
