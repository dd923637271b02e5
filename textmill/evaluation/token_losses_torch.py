"""Log-probabilities of single tokens from a torch net: the forward pass of all scorers.

A scorer gives the inputs, the labels and, for each label, the place that predicts it (an index into the flat inputs):

    ids_NT    [[5, 6, 7, 8]]
    places_M  [2, 3, 2]         two labels are predicted at the same place: after 7
    labels_M  [8, 9, 3]         -> log p(8 | 5 6 7), log p(9 | 5 6 7 8), log p(3 | 5 6 7)

Only these places get logits, a block at a time, since all logits of a batch would take gigabytes.

Shapes in names: N rows, T tokens, M predicted tokens, U distinct places that predict, S all places (N x T), E width,
V vocabulary, R rows of one block of logits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from textmill.devices import autocast
from textmill.kernels.availability import load_kernels
from textmill.kernels.transfer_torch import PendingCopy, copy_to_device
from textmill.models.base_torch import BaseNet
from textmill.models.cache_torch import Cache

KERNELS = "textmill.kernels.cross_entropy_triton"
"""Its kernel reads the logits of a token once, where torch reads and writes them several times."""
MAX_LOGITS = 1 << 26
MAX_KERNEL_LOGITS = 1 << 28
"""Logits held at once, however large the vocabulary: 256 MiB in fp32; with the kernel, 512 MiB in bf16."""


Result = tuple[NDArray[np.float64], NDArray[np.bool_]]
"""The log-likelihood of each label, and whether it is the likeliest token."""


@torch.inference_mode()
def token_log_likelihoods(
    net: BaseNet,
    ids_NT: NDArray[np.int64],
    places_M: NDArray[np.int64],
    labels_M: NDArray[np.int64],
    precision: torch.dtype,
    *,
    cache: Cache | None = None,
    greedy: bool = False,
) -> Callable[[], Result]:
    """Queue the work on the device and return a function that waits for the result.

    Without `greedy`, the second array of the result is empty, unless a kernel computes it anyway.
    """
    device = net.head.device
    with autocast(device, precision):
        hidden_NTE = net(copy_to_device(ids_NT, device), cache=cache)
        hidden_SE = hidden_NTE.flatten(0, 1)
        if (kernels := find_kernel(net)) is not None:
            return _with_kernel(net, hidden_SE, places_M, labels_M, precision, kernels)
        result = _with_torch(net, hidden_SE, places_M, labels_M, greedy)
        return lambda: result


def find_kernel(net: BaseNet) -> Any:
    """The kernel, for a net on a GPU that has all rows of the head and no cap of its logits; None: `net.logits`
    computes them."""
    has_all_rows = len(net.head) >= net.shape.vocab
    return load_kernels(KERNELS) if net.head.is_cuda and has_all_rows and not net.logit_softcap else None


def _with_kernel(
    net: BaseNet,
    hidden_SE: Tensor,
    places_M: NDArray[np.int64],
    labels_M: NDArray[np.int64],
    precision: torch.dtype,
    kernels: Any,
) -> Callable[[], Result]:
    """Logits row by row in a kernel; a place that predicts several labels is computed for each."""
    places, labels = (copy_to_device(array, hidden_SE.device) for array in (places_M, labels_M))
    block_rows = max(1, MAX_KERNEL_LOGITS // net.shape.padded_vocab)
    head_VE = net.head.to(precision)
    bias_V = None if net.head_bias is None else net.head_bias.to(precision)
    blocks: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(places), block_rows):
        block = slice(start, start + block_rows)
        x_RE = net.head_input(hidden_SE[places[block]])
        logits_RV = F.linear(x_RE.to(precision), head_VE, bias_V)
        blocks.append(kernels.cross_entropy_and_correct(logits_RV, labels[block], net.shape.vocab))
    losses, correct = (PendingCopy(torch.cat(tensors)) for tensors in zip(*blocks, strict=True))
    return lambda: (-losses.array().astype(np.float64), correct.array().astype(np.bool_))


def _with_torch(
    net: BaseNet, hidden_SE: Tensor, places_M: NDArray[np.int64], labels_M: NDArray[np.int64], greedy: bool
) -> Result:
    """Logits of each distinct place once, block by block; the labels are sorted by place, and unsorted at the end."""
    device = hidden_SE.device
    places_U, index_M = np.unique(places_M, return_inverse=True)  # index_M: which of places_U predicts a label
    order_M = np.argsort(index_M, kind="stable")
    indices, labels = (torch.from_numpy(array[order_M]).to(device) for array in (index_M, labels_M))
    hidden_UE = hidden_SE[torch.from_numpy(places_U).to(device)]
    block_rows = max(1, MAX_LOGITS // net.shape.padded_vocab)
    label_bounds = np.searchsorted(index_M[order_M], np.arange(0, len(places_U) + block_rows, block_rows))
    log_likelihoods: list[Tensor] = []
    is_likeliest: list[Tensor] = []
    for block, (begin, end) in enumerate(itertools.pairwise(label_bounds)):
        start = block * block_rows
        logits_RV = net.logits(hidden_UE[start : start + block_rows]).float()
        row = indices[begin:end] - start
        label = labels[begin:end]
        log_likelihoods.append(logits_RV[row, label] - logits_RV.logsumexp(-1)[row])
        if greedy:
            is_likeliest.append(logits_RV.argmax(-1)[row] == label)
    unsort_M = np.argsort(order_M, kind="stable")
    log_likelihoods_M = torch.cat(log_likelihoods).double().cpu().numpy()[unsort_M]
    greedy_M = torch.cat(is_likeliest).cpu().numpy()[unsort_M] if greedy else np.zeros(0, np.bool_)
    return log_likelihoods_M, greedy_M
