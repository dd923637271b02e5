"""Bits per byte during training, from the loss and the bytes of text that the tokens were made from."""

from __future__ import annotations

import math

from textmill.config import TrainConfig
from textmill.tokens.splits import Splits

EVERY_TOKEN = ("packed", "padded", "features")
"""Layouts in which every token has a loss, so that the loss of a token is that of its bytes."""


def bits_factor(data: Splits, split: str, train: TrainConfig) -> float | None:
    """Times a loss in nats per token this is bits per byte; None if the bytes are not known or not all have a loss."""
    counts = data.manifest.get("splits", {}).get(split) or {}
    octets = counts.get("bytes")
    tokens = counts.get("tokens")
    if train.layout not in EVERY_TOKEN or not octets or not tokens:
        return None
    return float(tokens / octets / math.log(2))


def train_bits_factor(data: Splits, train: TrainConfig) -> float | None:
    """The same for the train loss; None if it is more than the cross-entropy."""
    return None if train.label_smoothing or train.z_loss else bits_factor(data, "train", train)
