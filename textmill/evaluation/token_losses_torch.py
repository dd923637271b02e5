"""Log-probabilities of single tokens from a torch net. Shapes in names: N rows, T tokens, M predicted tokens,
U places that predict, S all places, E width, V vocabulary."""

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
MAX_LOGITS, MAX_KERNEL_LOGITS = 1 << 26, 1 << 28
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
    """Queue the work on the device; calling what is returned waits for it. Without `greedy` the second part is empty.

    `places_M` are indices into the flat `ids_NT`: the token after which a label is predicted. Only these places get
    logits, block by block.
    """
    device = net.head.device
    with autocast(device, precision):
        hidden_NTE = net(copy_to_device(ids_NT, device), cache=cache)
        hidden_SE = hidden_NTE.flatten(0, 1)
        if (fused := find_kernel(net)) is not None:
            return _with_kernel(net, hidden_SE, places_M, labels_M, precision, fused)
        found = _with_torch(net, hidden_SE, places_M, labels_M, greedy)
        return lambda: found


def find_kernel(net: BaseNet) -> Any:
    """The kernel, for a net on a GPU that has all rows of the head and no cap of its logits; None: `net.logits`
    computes them."""
    whole = len(net.head) >= net.shape.vocab
    return load_kernels(KERNELS) if net.head.is_cuda and whole and not net.logit_softcap else None


def _with_kernel(
    net: BaseNet, hidden_SE: Tensor, places_M: NDArray[np.int64], labels_M: NDArray[np.int64], precision: torch.dtype,
    fused: Any,
) -> Callable[[], Result]:  # fmt: skip
    """Logits row by row in a kernel; a place that predicts several labels is computed for each."""
    places, labels = (copy_to_device(array, hidden_SE.device) for array in (places_M, labels_M))
    rows, found = max(1, MAX_KERNEL_LOGITS // net.shape.padded_vocab), list[tuple[Tensor, Tensor]]()
    head_VE, bias_V = net.head.to(precision), None if net.head_bias is None else net.head_bias.to(precision)
    for start in range(0, len(places), rows):
        x_RE = net.head_input(hidden_SE[places[start : start + rows]])
        logits_RV = F.linear(x_RE.to(precision), head_VE, bias_V)
        found.append(fused.cross_entropy_and_correct(logits_RV, labels[start : start + rows], net.shape.vocab))
    losses, correct = (PendingCopy(torch.cat(parts)) for parts in zip(*found, strict=True))
    return lambda: (-losses.array().astype(np.float64), correct.array().astype(np.bool_))


def _with_torch(
    net: BaseNet, hidden_SE: Tensor, places_M: NDArray[np.int64], labels_M: NDArray[np.int64], greedy: bool
) -> Result:
    """Logits of each place once, block by block."""
    device = hidden_SE.device
    places_U, where_M = np.unique(places_M, return_inverse=True)
    order = np.argsort(where_M, kind="stable")
    where, labels = (torch.from_numpy(array[order]).to(device) for array in (where_M, labels_M))
    found: list[Tensor] = []
    likeliest: list[Tensor] = []
    rows = max(1, MAX_LOGITS // net.shape.padded_vocab)
    hidden_UE = hidden_SE[torch.from_numpy(places_U).to(device)]
    bounds = np.searchsorted(where_M[order], np.arange(0, len(places_U) + rows, rows))
    for begin, (first, last) in enumerate(itertools.pairwise(bounds)):
        start = begin * rows
        logits_UV = net.logits(hidden_UE[start : start + rows]).float()
        at, label = where[first:last] - start, labels[first:last]
        found.append(logits_UV[at, label] - logits_UV.logsumexp(-1)[at])
        if greedy:
            likeliest.append(logits_UV.argmax(-1)[at] == label)
    back = np.argsort(order, kind="stable")
    log_likelihoods_M = torch.cat(found).double().cpu().numpy()[back]
    greedy_M = torch.cat(likeliest).cpu().numpy()[back] if greedy else np.zeros(0, np.bool_)
    return log_likelihoods_M, greedy_M
