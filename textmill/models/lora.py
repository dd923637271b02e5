"""LoRA without a framework: which matrices get adapters, their initial values, and PEFT's adapter_config.json."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from textmill.checkpoints.adapters import LORA_A, LORA_B
from textmill.config import LoraConfig
from textmill.errors import TextmillError
from textmill.models import Shape, Weight, label_head_of, open_family
from textmill.models.weights import count_parameters, sample_weights
from textmill.storage.tensor_files import Named

SITES = 1 << 16
"""The first dropout site of adapters, far above the sites of a net."""
ALL = "all"
"""The target that means every matrix that can have an adapter."""

TASK_TYPES = {
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "question-answering": "QUESTION_ANS",
}
"""PEFT's names of the tasks with labels."""


def adapter_weights(shape: Shape, lora: LoraConfig | None) -> list[Weight]:
    """The weights of the adapters: A and B of each target matrix; B has the layout of its matrix's outputs."""
    if lora is None:
        return []
    weights = []
    for weight in target_weights(shape, lora):
        # The same standard deviation as PEFT's initialisation: uniform between +-1/sqrt(inputs).
        std = 1 / math.sqrt(3 * weight.inputs)
        module = weight.parameter.removesuffix(".weight")
        is_divided = weight.split is not None
        # Tensor parallelism splits A of a row-parallel matrix and B of a column-parallel one. Of the other one each
        # rank has all, but computes a part of its gradient.
        splits_a = weight.split == 1
        splits_b = weight.split == 0
        weights += [
            Weight(
                weight.stem + LORA_A,
                (lora.rank, weight.inputs),
                std,
                parameter=module + LORA_A,
                decay=True,
                depth=weight.depth,
                split=1 if splits_a else None,
                partial_gradient=is_divided and not splits_a,
            ),
            Weight(
                weight.stem + LORA_B,
                (weight.outputs, lora.rank),
                parameter=module + LORA_B,
                decay=True,
                depth=weight.depth,
                split=0 if splits_b else None,
                partial_gradient=is_divided and not splits_b,
                parts=weight.parts,
                groups=weight.groups,
            ),
        ]
    return weights


def weights_with_adapters(shape: Shape, lora: LoraConfig | None) -> list[Weight]:
    """All weights of a net, those of its adapters last."""
    return [*shape.weights(), *adapter_weights(shape, lora)]


def saved_weights(shape: Shape, lora: LoraConfig | None) -> list[Weight]:
    """The weights that a checkpoint stores: all, or with adapters only what is trained."""
    return trained_with_adapters(shape, lora) if lora else shape.weights()


def trained_with_adapters(shape: Shape, lora: LoraConfig) -> list[Weight]:
    """The adapters, and a head for labels, which is new and so trained completely."""
    head = [weight for weight in shape.weights() if weight.head] if label_head_of(shape) else []
    return [*head, *adapter_weights(shape, lora)]


def count_with_adapters(shape: Shape, lora: LoraConfig | None) -> int:
    """The number of parameters of a net with its adapters."""
    return count_parameters(weights_with_adapters(shape, lora))


def target_weights(shape: Shape, lora: LoraConfig) -> list[Weight]:
    """The matrices that get an adapter: a pattern matches a full name, its last parts, or a module with the matrix."""
    matrices = {weight.parameter.removesuffix(".weight"): weight for weight in _matrices(shape)}
    if ALL in lora.targets:
        return list(matrices.values())
    chosen: set[str] = set()
    for pattern in lora.targets:
        forms = (pattern, f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*")
        matched = {name for name in matrices if any(fnmatchcase(name, form) for form in forms)}
        if not matched:
            ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in matrices))
            raise TextmillError(
                f"model.lora.targets: '{pattern}' matches no matrix of this model; it has {ends} in each block"
            )
        chosen |= matched
    return [weight for name, weight in matrices.items() if name in chosen]


def _matrices(shape: Shape) -> list[Weight]:
    return [weight for weight in shape.weights() if weight.lora]


def dropout_sites(shape: Shape) -> dict[str, int]:
    """The dropout site of each matrix's adapter, by the matrix's stem; it does not depend on the targets.

    From block to block the site grows by 3, as the net's own sites do: `site_in_block` is the same in every block."""
    matrices = _matrices(shape)
    per_block = len(matrices) // shape.layers
    sites = {}
    for number, weight in enumerate(matrices):
        block, place = divmod(number, per_block)
        sites[weight.stem] = SITES * (1 + place) + 3 * block
    return sites


def uses_dropout(shape: Shape, lora: LoraConfig | None) -> bool:
    """True if training uses dropout, in the net or in its adapters."""
    return shape.uses_dropout or (lora is not None and lora.dropout > 0)


def initial_adapters(shape: Shape, lora: LoraConfig, seed: int) -> Iterator[Named]:
    """Initial adapters: A is random (seed and name decide it), B is zero, so that the net starts as its base model."""
    return sample_weights(adapter_weights(shape, lora), seed)


def peft_config_of(shape: Shape, lora: LoraConfig, base: str) -> dict[str, Any]:
    """The adapter_config.json for PEFT; targets are the last parts of their names if those are unambiguous."""
    targets = target_weights(shape, lora)
    names = [weight.parameter.removesuffix(".weight") for weight in targets]
    ends = sorted({name.rpartition(".")[2] for name in names})
    with_these_ends = [
        weight for weight in shape.weights() if len(weight.shape) == 2 and weight.stem.rpartition(".")[2] in ends
    ]
    causal = open_family(shape.family).OBJECTIVE == "next_token"
    task, _ = label_head_of(shape) or ("", ())
    head = dict.fromkeys(weight.parameter.partition(".")[0] for weight in shape.weights() if task and weight.head)
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "task_type": TASK_TYPES.get(task, "CAUSAL_LM" if causal else None),
        "modules_to_save": list(head) or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": any(weight.transposed for weight in targets),
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": ends if len(with_these_ends) == len(names) else names,
    }
