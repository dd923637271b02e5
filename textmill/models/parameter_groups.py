"""What an optimizer does to each weight: whether it is trained, its weight decay and its learning rate."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from textmill.config import LoraConfig, TrainConfig
from textmill.errors import TextmillError
from textmill.models import Shape
from textmill.models.lora import trained_with_adapters, weights_with_adapters


@dataclass(frozen=True)
class Rule:
    """How one weight is updated; weights with equal rules are one parameter group of the optimizer."""

    trained: bool
    """A frozen weight has no gradient, no moments and no weight decay."""
    decay: float
    """Its weight decay: `train.weight_decay` or 0."""
    rate: float
    """Its learning rate, as a multiple of the step's."""


def rules_of(shape: Shape, train: TrainConfig, lora: LoraConfig | None = None) -> dict[str, Rule]:
    """The rule of every weight by its checkpoint name; the same for every engine.

    Layer-wise learning rate: a weight uses the step's rate times `train.layer_decay` to the power of its depth: 0 after
    the blocks, 1 in the last block, `layers` in the first, `layers + 1` in the embeddings (and so in a tied head).
    Embeddings that are not also the head use `train.embedding_rate_factor` times that.
    Weight decay applies to matrices and embeddings. With LoRA, only the adapters and a head for labels are trained.
    """
    weights = {weight.parameter: weight for weight in weights_with_adapters(shape, lora)}
    frozen = matching(train.freeze, weights, "train.freeze")
    if lora is not None:
        frozen |= weights.keys() - {weight.parameter for weight in trained_with_adapters(shape, lora)}
    if len(frozen) == len(weights):
        raise TextmillError("train.freeze: matches every weight, so nothing is trained; remove some patterns")
    rules = {}
    for short, weight in weights.items():
        trained = short not in frozen
        decays = trained and weight.decay
        rate = train.layer_decay**weight.depth * (train.embedding_rate_factor if weight.looked_up else 1.0)
        rules[weight.name] = Rule(trained, train.weight_decay * decays, rate)
    return rules


def matches(name: str, pattern: str) -> bool:
    """True if a pattern matches a parameter's name, or a module that has it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def matching(patterns: Iterable[str], names: Iterable[str], setting: str) -> set[str]:
    """The names that some pattern matches; a pattern that matches none is an error."""
    names = list(names)
    found = set()
    for pattern in patterns:
        matched = {name for name in names if matches(name, pattern)}
        if not matched:
            parts = {
                ".".join(path[:count])
                for path in (name.split(".") for name in names)
                for count in range(1, len(path) + 1)
            }
            near = difflib.get_close_matches(pattern, sorted(parts), n=3, cutoff=0.4) or names[:3]
            raise TextmillError(
                f"{setting}: '{pattern}' matches no weight of this model; the nearest are {', '.join(near)}"
            )
        found |= matched
    return found
