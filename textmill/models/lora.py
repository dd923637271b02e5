"""LoRA as numbers: which matrices get an adapter, how it starts, and what PEFT is told of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from textmill.checkpoints.adapters import Adapter
from textmill.config import LoraConfig
from textmill.errors import TextmillError
from textmill.models import Weight, first_of, open_family
from textmill.storage.tensor_files import Named

SITES = 1 << 16
"""Where dropout's counters of adapters begin, far above a net's own."""


def adapters_of(shape: Any, lora: LoraConfig | None) -> list[Weight]:
    """The weights of the adapters, A and B of each matrix that the targets name; B lies as its matrix' outputs do."""
    if lora is None:
        return []
    weights = []
    for weight in _targets(shape, lora):
        stem, (inputs, outputs) = weight.name.removesuffix(".weight"), weight.shape
        laid: Any = "qkv_bias" if weight.layout == "qkv" else "plain"
        # As wide as PEFT's uniform start between plus and minus one over the root of the inputs.
        start = 1 / math.sqrt(3 * inputs)
        first = Weight(f"{stem}.lora_A.weight", (lora.rank, inputs), start, decay=True, depth=weight.depth)
        second = Weight(f"{stem}.lora_B.weight", (outputs, lora.rank), 0, laid, decay=True, depth=weight.depth)
        # Tensor peers cut that one of the two which meets what they cut of the matrix, and have the other in common.
        for one, side in ((first, 1), (second, 0)):
            cut = side if weight.split == side else None
            weights.append(replace(one, split=cut, partial=weight.split is not None and cut is None))
    return weights


def weights_with(shape: Any, lora: LoraConfig | None) -> list[Weight]:
    """All weights of a net, those of its adapters last."""
    return [*open_family(shape.family).weights_of(shape), *adapters_of(shape, lora)]


def saved_of(shape: Any, lora: LoraConfig | None) -> list[Weight]:
    """The weights that a checkpoint holds: the adapters alone, where there are any."""
    return adapters_of(shape, lora) or weights_with(shape, None)


def count_with(shape: Any, lora: LoraConfig | None) -> int:
    """How many numbers all of them have."""
    return sum(math.prod(weight.shape) for weight in weights_with(shape, lora))


def _targets(shape: Any, lora: LoraConfig) -> list[Weight]:
    """The matrices that get an adapter: each pattern names one, or a part of the net, by the end of its name or the whole of it."""
    family = open_family(shape.family)
    matrices = {family.memory_name(weight.name).removesuffix(".weight"): weight for weight in _matrices(shape)}
    chosen: set[str] = set()
    for pattern in lora.targets:
        forms = (pattern, f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*")
        found = {name for name in matrices if any(fnmatchcase(name, form) for form in forms)}
        if not found:
            ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in matrices))
            raise TextmillError(
                f"model.lora.targets: '{pattern}' matches no matrix of this model; it has {ends} in each block"
            )
        chosen |= found
    return [weight for name, weight in matrices.items() if name in chosen]


def _matrices(shape: Any) -> list[Weight]:
    return [weight for weight in open_family(shape.family).weights_of(shape) if weight.layout in ("linear", "qkv")]


def sites_of(shape: Any) -> dict[str, int]:
    """By the stem of each matrix, the site of dropout in its adapter; the same whatever the targets are.

    From block to block a matrix' site moves on by 3, as those of the net itself do: with keys of its own every block has the same."""
    matrices = _matrices(shape)
    each = len(matrices) // shape.layers
    return {
        weight.name.removesuffix(".weight"): SITES * (1 + number % each) + 3 * (number // each)
        for number, weight in enumerate(matrices)
    }


def drops(shape: Any, lora: LoraConfig | None) -> bool:
    """Whether training drops anything, in the net or in its adapters."""
    return shape.drops or (lora is not None and lora.dropout > 0)


def first_adapters(shape: Any, lora: LoraConfig, seed: int) -> Iterator[Named]:
    """Adapters before the first step: A from seed and name, B nothing, so that the net starts as its base."""
    return first_of(adapters_of(shape, lora), seed)


def lora_of(adapter: Adapter, shape: Any) -> LoraConfig:
    """The settings with which a net gets the very matrices of an adapter folder."""
    short = open_family(shape.family).memory_name
    targets = [short(stem) for stem in adapter.pairs]
    return LoraConfig(rank=adapter.rank, alpha=adapter.scale * adapter.rank, dropout=adapter.dropout, targets=targets)


def peft_config_of(shape: Any, lora: LoraConfig, base: str) -> dict[str, Any]:
    """The adapter_config.json with which PEFT opens the adapter; targets by their last word where that says it all."""
    short = open_family(shape.family).memory_name
    names = [short(weight.name).removesuffix(".weight") for weight in _targets(shape, lora)]
    ends = sorted({name.rpartition(".")[2] for name in names})
    alike = [weight for weight in _matrices(shape) if weight.name.removesuffix(".weight").rpartition(".")[2] in ends]
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank, "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout, "bias": "none", "fan_in_fan_out": True, "inference_mode": True, "init_lora_weights": True,
        "target_modules": ends if len(alike) == len(names) else names,
    }  # fmt: skip
