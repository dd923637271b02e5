"""Shapes of small nets, and random weights for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from textmill.checkpoints.adapters import ADAPTER_CONFIG, open_adapter, read_base_and_adapter
from textmill.config import LoraConfig, ModelConfig, ShapeConfig
from textmill.models import open_family, read_shape
from textmill.models.base_torch import BaseNet
from textmill.models.lora import weights_with_adapters
from textmill.models.nets_torch import fill, new_net
from textmill.models.weights import sample_weights
from textmill.storage.files import read_json


def shape_of(size: str, numbers: dict[str, Any], vocab: int) -> Any:
    return open_family("gpt2").shape_of(ModelConfig(size=size, shape=ShapeConfig(**numbers)), vocab=vocab, eos_id=0)


def noisy_weights(shape: Any, seed: int = 3, lora: LoraConfig | None = None) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Return initial weights with noise, so that no bias is 0 and no scale is 1; with those of adapters."""
    dice = np.random.default_rng(seed)
    first = sample_weights(weights_with_adapters(shape, lora), seed)
    return [(name, values + dice.normal(0, 0.05, values.shape).astype(np.float32)) for name, values in first]


def open_with_adapters(folder: Path) -> BaseNet:
    """The net of an adapter folder, with its adapters as branches, as in training: exactly its matrices as targets."""
    adapter, shape = open_adapter(folder), read_shape(folder)
    known = {weight.stem: weight.parameter.removesuffix(".weight") for weight in shape.weights()}
    named = [(stem + ".weight", first) for stem, (first, _) in adapter.pairs.items()]
    stems = [name.removesuffix(".weight") for name, _ in open_family(shape.family).known_weights(named)]
    targets = [known.get(stem, stem) for stem in stems]
    dropout = read_json(folder / ADAPTER_CONFIG).get("lora_dropout", 0.0)
    lora = LoraConfig(rank=adapter.rank, alpha=adapter.scale * adapter.rank, dropout=dropout, targets=targets)
    net = new_net(shape, torch.device("cpu"), lora)
    fill(net, read_base_and_adapter(adapter), str(folder))
    return net
