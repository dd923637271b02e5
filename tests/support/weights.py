"""Shapes of small nets, and random weights for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from textmill.config import ModelConfig, ShapeConfig
from textmill.models import initial_weights, open_family


def shape_of(size: str, numbers: dict[str, Any], vocab: int) -> Any:
    return open_family("gpt2").shape_of(ModelConfig(size=size, shape=ShapeConfig(**numbers)), vocab=vocab, end=0)


def noisy_weights(shape: Any, seed: int = 3) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Return initial weights with noise, so that no bias is 0 and no scale is 1."""
    dice = np.random.default_rng(seed)
    first = initial_weights(shape, seed)
    return [(name, values + dice.normal(0, 0.05, values.shape).astype(np.float32)) for name, values in first]
