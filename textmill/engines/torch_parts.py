"""What torch engines share: batches on the device, what each token counts for, the net's states."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from textmill.models.nets_torch import Net
from textmill.tokens.batches.batch import IGNORED, Batch


def on_device(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """An array on the device, without a wait where that is possible."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def attention_order(device: torch.device) -> AbstractContextManager[Any]:
    """Which attention kernels are asked first: cuDNN's, the fastest for training where it can do the work."""
    if device.type != "cuda":
        return nullcontext()
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kernels, set_priority=True)


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


def hidden_states(net: Net, inputs_NT: Tensor, keys_N: Tensor | None, documents_NT: Tensor | None, precision: torch.dtype) -> Tensor:
    """The net's last states [tokens, width], in the precision of the products; documents are kept apart if given."""
    return net(inputs_NT, keys_N, documents_NT=documents_NT).to(precision).flatten(0, 1)
