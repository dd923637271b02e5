"""Log-probabilities of single tokens from a torch net. Shapes in names: N rows, T tokens, M predicted tokens,
U places that predict, E width, V vocabulary."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from textmill.devices import autocast
from textmill.models.base_torch import BaseNet
from textmill.models.cache_torch import Cache

MAX_LOGITS = 1 << 26
"""Logits held at once: 256 MiB in fp32, however large the vocabulary."""


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
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """The log-likelihood of each label and, if `greedy`, whether it is the likeliest token.

    `places_M` are indices into the flat `ids_NT`: the token after which a label is predicted. Only these places get
    logits, each once, block by block.
    """
    device = net.head.device
    places_U, where_M = np.unique(places_M, return_inverse=True)
    order = np.argsort(where_M, kind="stable")
    where, labels = (torch.from_numpy(array[order]).to(device) for array in (where_M, labels_M))
    found: list[Tensor] = []
    likeliest: list[Tensor] = []
    rows = max(1, MAX_LOGITS // net.shape.padded_vocab)
    with autocast(device, precision):
        hidden_NTE = net(torch.from_numpy(ids_NT).to(device), cache=cache)
        hidden_UE = hidden_NTE.flatten(0, 1)[torch.from_numpy(places_U).to(device)]
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
