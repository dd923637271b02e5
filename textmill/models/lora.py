"""LoRA without a framework: which matrices get an adapter, how it starts, and the adapter_config.json that PEFT reads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from textmill.checkpoints.adapters import LORA_A, LORA_B, Adapter
from textmill.config import LoraConfig
from textmill.errors import TextmillError
from textmill.models import Shape, Weight, open_family, weights_of
from textmill.models.weights import count_parameters, sample_weights
from textmill.storage.tensor_files import Named

SITES = 1 << 16
"""Where dropout's counters of adapters begin, far above a net's own."""
ALL = "all"
"""The target that stands for every matrix that can have an adapter."""


def adapters_of(shape: Shape, lora: LoraConfig | None) -> list[Weight]:
    """The weights of the adapters, A and B of each target matrix; B is laid out as its matrix' outputs are."""
    if lora is None:
        return []
    weights = []
    for weight in target_weights(shape, lora):
        # As wide as PEFT's uniform start between plus and minus one over the root of the inputs.
        std = 1 / math.sqrt(3 * weight.inputs)
        first = Weight(weight.stem + LORA_A, (lora.rank, weight.inputs), std, decay=True, depth=weight.depth)
        layout: dict[str, Any] = {"parts": weight.parts, "groups": weight.groups}
        second = Weight(weight.stem + LORA_B, (weight.outputs, lora.rank), decay=True, depth=weight.depth, **layout)
        # Tensor-parallel ranks divide the one of the two that meets what they divide of the matrix; all have the other.
        for one, axis, ending in ((first, 1, LORA_A), (second, 0, LORA_B)):
            split = axis if weight.split == axis else None
            parameter = weight.parameter.removesuffix(".weight") + ending
            partial = weight.split is not None and split is None
            weights.append(replace(one, parameter=parameter, split=split, partial_gradient=partial))
    return weights


def weights_with(shape: Shape, lora: LoraConfig | None) -> list[Weight]:
    """All weights of a net, those of its adapters last."""
    return [*weights_of(shape), *adapters_of(shape, lora)]


def saved_of(shape: Shape, lora: LoraConfig | None) -> list[Weight]:
    """The weights that a checkpoint stores: the adapters alone, where there are any."""
    return adapters_of(shape, lora) or weights_of(shape)


def count_with(shape: Shape, lora: LoraConfig | None) -> int:
    """How many numbers a net with its adapters has."""
    return count_parameters(weights_with(shape, lora))


def target_weights(shape: Shape, lora: LoraConfig) -> list[Weight]:
    """The matrices that get an adapter: a pattern matches the end of a name, all of it, or a module that has the matrix."""
    matrices = {weight.parameter.removesuffix(".weight"): weight for weight in _matrices(shape)}
    if ALL in lora.targets:
        return list(matrices.values())
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


def plain_targets(shape: Shape, lora: LoraConfig) -> list[str]:
    """The targets as a run records them: `all` for patterns that match every matrix, so that both count as the same setting."""
    return [ALL] if len(target_weights(shape, lora)) == len(_matrices(shape)) else lora.targets


def _matrices(shape: Shape) -> list[Weight]:
    return [weight for weight in weights_of(shape) if weight.lora]


def sites_of(shape: Shape) -> dict[str, int]:
    """The dropout site of each matrix' adapter, by the matrix' stem; the same whatever the targets are.

    From block to block a matrix' site grows by 3, as those of the net itself do: with keys of its own every block has the same."""
    matrices = _matrices(shape)
    each = len(matrices) // shape.layers
    return {weight.stem: SITES * (1 + number % each) + 3 * (number // each) for number, weight in enumerate(matrices)}


def drops(shape: Shape, lora: LoraConfig | None) -> bool:
    """Whether training uses dropout, in the net or in its adapters."""
    return shape.drops or (lora is not None and lora.dropout > 0)


def initial_adapters(shape: Shape, lora: LoraConfig, seed: int) -> Iterator[Named]:
    """Adapters before the first step: A from seed and name, B zero, so that the net starts as its base."""
    return sample_weights(adapters_of(shape, lora), seed)


def lora_of(adapter: Adapter, shape: Shape) -> LoraConfig:
    """The settings with which a net gets exactly the matrices of an adapter folder."""
    known = {weight.stem: weight.parameter.removesuffix(".weight") for weight in _matrices(shape)}
    named = [(stem + ".weight", first) for stem, (first, _) in adapter.pairs.items()]
    stems = [name.removesuffix(".weight") for name, _ in open_family(shape.family).known_weights(named)]
    targets = [known.get(stem, stem) for stem in stems]
    return LoraConfig(rank=adapter.rank, alpha=adapter.scale * adapter.rank, dropout=adapter.dropout, targets=targets)


def peft_config_of(shape: Shape, lora: LoraConfig, base: str) -> dict[str, Any]:
    """The adapter_config.json with which PEFT opens the adapter; targets by the last word of their name where that suffices."""
    targets = target_weights(shape, lora)
    names = [weight.parameter.removesuffix(".weight") for weight in targets]
    ends = sorted({name.rpartition(".")[2] for name in names})
    alike = [weight for weight in _matrices(shape) if weight.stem.rpartition(".")[2] in ends]
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank, "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout, "bias": "none", "fan_in_fan_out": any(weight.transposed for weight in targets),
        "inference_mode": True, "init_lora_weights": True, "target_modules": ends if len(alike) == len(names) else names,
    }  # fmt: skip
