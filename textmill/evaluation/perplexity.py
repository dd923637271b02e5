"""The summed loss of a split under a net, every token once. Shapes in names: N windows, T tokens, M asked tokens, E width, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from textmill.devices import arithmetic
from textmill.errors import TextmillError
from textmill.models.nets_torch import Net
from textmill.storage.progress import progress
from textmill.tokens.batches.batch import IGNORED, Batch
from textmill.tokens.batches.windows import window_batches
from textmill.tokens.store import TokenStore

LOGITS_AT_A_TIME = 1 << 26
"""Scores held at once: 256 MiB in fp32, however large the vocabulary."""


@dataclass(frozen=True)
class Losses:
    """Sums over the tokens of a split."""

    loss: float
    """In nats."""
    tokens: int


def perplexity(
    net: Net,
    store: TokenStore,
    *,
    length: int,
    stride: int,
    batch: int,
    first: int,
    precision: torch.dtype = torch.float32,
) -> Losses:
    """Sum the loss of every token of a store once, `batch` windows at a time; `first` stands before the first token."""
    device = next(parameter.device for _, parameter in net.named_parameters())
    loss, tokens = 0.0, 0
    with progress("evaluate", total=store.tokens, unit="tokens") as bar:
        for windows in window_batches(store, length=length, stride=stride, batch=batch, first=first):
            _check_ids(windows, net.shape.vocab, store.prefix)
            losses_M = _losses(net, windows, device, precision)
            loss += float(losses_M.cpu().double().sum())
            tokens += len(losses_M)
            bar.advance(len(losses_M))
    return Losses(loss, tokens)


@torch.inference_mode()
def _losses(net: Net, windows: Batch, device: torch.device, precision: torch.dtype) -> Tensor:
    """The loss of each asked token; scores are made for these alone, and not all at once."""
    inputs_NT, labels_NT = (torch.from_numpy(array).to(device) for array in (windows.inputs, windows.labels))
    asked_NT = labels_NT != IGNORED
    labels_M = labels_NT[asked_NT].long()
    with arithmetic(device, precision):
        hidden_ME = net(inputs_NT)[asked_NT]
        rows = max(1, LOGITS_AT_A_TIME // net.shape.padded_vocab)
        parts = [
            F.cross_entropy(
                net.logits(hidden_ME[begin : begin + rows]).float(), labels_M[begin : begin + rows], reduction="none"
            )
            for begin in range(0, len(labels_M), rows)
        ]
    return torch.cat(parts)


def _check_ids(windows: Batch, vocab: int, where: Path) -> None:
    ids = np.concatenate([windows.inputs.ravel(), windows.labels[windows.labels != IGNORED]])
    if ids.max() >= vocab or ids.min() < 0:
        raise TextmillError(
            f"{where}: holds token ids from {ids.min()} to {ids.max()}, the model knows {vocab:,}; make it with the model's own tokenizer"
        )
