"""What an optimizer does to each weight: whether it is trained, its weight decay and its learning rate."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from textmill.config import LoraConfig, TrainConfig
from textmill.errors import TextmillError
from textmill.models import Shape
from textmill.models.lora import adapters_of, weights_with


@dataclass(frozen=True)
class Rule:
    """How one weight is updated; weights with equal rules are one parameter group of the optimizer."""

    trained: bool
    """A weight that is not has no gradient, no moments and no decay."""
    decay: float
    """Its weight decay: that of the config, or 0."""
    rate: float
    """Its learning rate, as a multiple of the step's."""


def rules_of(shape: Shape, train: TrainConfig, lora: LoraConfig | None = None) -> dict[str, Rule]:
    """The rule of every weight by its checkpoint name; the same for every engine.

    The rate of block i is `train.learning_rate * train.layer_decay ** (layers - i)`, so the last block has one power of it and
    the first has `layers`; embeddings (and so the tied head) have `layers + 1`, and what comes after the blocks has none.
    Matrices and embeddings are decayed, or what `train.weight_decay_only` names instead, and of those nothing that `train.no_weight_decay` names.
    Where there are adapters, they have rules too, and nothing else is trained.
    """
    weights = {weight.parameter: weight for weight in weights_with(shape, lora)}
    frozen, decayed, undecayed = (
        matching(getattr(train, key), weights, f"train.{key}")
        for key in ("freeze", "weight_decay_only", "no_weight_decay")
    )
    if lora is not None:
        frozen |= weights.keys() - {weight.parameter for weight in adapters_of(shape, lora)}
    if len(frozen) == len(weights):
        raise TextmillError("train.freeze: leaves nothing to train; take some of it out")
    rules = {}
    for short, weight in weights.items():
        trained = short not in frozen
        decays = trained and short not in undecayed and (short in decayed if train.weight_decay_only else weight.decay)
        rules[weight.name] = Rule(trained, train.weight_decay * decays, train.layer_decay**weight.depth)
    return rules


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a parameter's name, or a module that has it."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def matching(patterns: Iterable[str], names: Iterable[str], setting: str) -> set[str]:
    """The names that some pattern matches; a pattern that matches none is refused."""
    names, found = list(names), set()
    for pattern in patterns:
        matched = {name for name in names if matches(name, pattern)}
        if not matched:
            parts = {
                ".".join(words[:count])
                for words in (name.split(".") for name in names)
                for count in range(1, len(words) + 1)
            }
            near = difflib.get_close_matches(pattern, sorted(parts), n=3, cutoff=0.4) or names[:3]
            raise TextmillError(
                f"{setting}: '{pattern}' matches no weight of this model; the nearest are {', '.join(near)}"
            )
        found |= matched
    return found
