"""Inputs of a cross-entropy, and its value and gradients by torch in fp64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from textmill.tokens.batches.batch import IGNORED

WIDTH, VOCAB, PADDED = 48, 301, 384


def given(tokens: int, dtype: torch.dtype, device: str, lean: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, a head with noise in its padding rows, labels (some without loss), and unequal weights.

    `lean` lowers all logits of the first token and raises those of the last one.
    """
    dice = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, WIDTH, generator=dice).to(dtype)
    head = (torch.randn(PADDED, WIDTH, generator=dice) * 0.3).to(dtype).float()
    if lean:
        x[:, 0], head[:, 0] = torch.linspace(-1, 1, tokens), lean
    labels = torch.randint(0, VOCAB, (tokens,), generator=dice, dtype=torch.int32)
    labels[::5] = IGNORED
    weights = torch.rand(tokens, generator=dice) / tokens
    return x.to(device), head.to(device), labels.to(device), weights.to(device)


def exact(x: Tensor, head: Tensor, labels: Tensor, weights: Tensor, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients by torch in fp64, over the real vocabulary alone."""
    x64, head64 = x.double().requires_grad_(), head.double().requires_grad_()
    logits = (x64 @ head64.T)[:, :VOCAB]
    losses = F.cross_entropy(logits, labels.long(), ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)
    loss = (losses * weights.double()).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert x64.grad is not None
    assert head64.grad is not None
    return loss.detach(), x64.grad, head64.grad


def relative_difference(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other).norm() / other.norm())
