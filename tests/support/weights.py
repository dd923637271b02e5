"""Shapes of small nets, and random weights for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from textmill.config import LoraConfig, ModelConfig, ShapeConfig
from textmill.models import open_family
from textmill.models.lora import weights_with_adapters
from textmill.models.weights import sample_weights


def shape_of(size: str, numbers: dict[str, Any], vocab: int) -> Any:
    return open_family("gpt2").shape_of(ModelConfig(size=size, shape=ShapeConfig(**numbers)), vocab=vocab, eos_id=0)


def noisy_weights(shape: Any, seed: int = 3, lora: LoraConfig | None = None) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Return initial weights with noise, so that no bias is 0 and no scale is 1; with those of adapters."""
    dice = np.random.default_rng(seed)
    first = sample_weights(weights_with_adapters(shape, lora), seed)
    return [(name, values + dice.normal(0, 0.05, values.shape).astype(np.float32)) for name, values in first]
