"""Which weights are trained and decayed, and their learning rates: patterns, and layer-wise decay as in BEiT."""

from __future__ import annotations

from typing import Any

import pytest

from textmill.config import ModelConfig, ShapeConfig, TrainConfig
from textmill.errors import TextmillError
from textmill.models import open_family
from textmill.models.parameter_groups import Rule, rules_of

LAYERS = 3


def shape_of(layers: int = LAYERS) -> Any:
    return open_family("gpt2").shape_of(
        ModelConfig(shape=ShapeConfig(layers=layers, heads=2, width=8)), vocab=50, eos_id=0
    )


def rules(**train: Any) -> dict[str, Rule]:
    return {
        name.removeprefix("transformer."): rule for name, rule in rules_of(shape_of(), TrainConfig(**train)).items()
    }


def test_matrices_and_embeddings_are_decayed() -> None:
    found = rules(weight_decay=0.3)
    assert len(found) == len(shape_of().weights())
    for name, rule in found.items():
        matrix = name.endswith(".weight") and "ln_" not in name
        assert rule == Rule(trained=True, decay=0.3 if matrix else 0.0, rate=1.0), name


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["wpe"], lambda name: name == "wpe.weight"),
        (["h.0.*"], lambda name: name.startswith("h.0.")),
        (["h.0"], lambda name: name.startswith("h.0.")),
        (["h.[01].attn", "*.bias"], lambda name: name.startswith(("h.0.attn", "h.1.attn")) or name.endswith(".bias")),
    ],
)
def test_patterns_freeze_weights_and_parts(patterns: list[str], frozen: Any) -> None:
    found = rules(freeze=patterns, weight_decay=0.1)
    assert {name for name, rule in found.items() if not rule.trained} == set(filter(frozen, found))
    assert all(rule.decay == 0 for rule in found.values() if not rule.trained)


def test_deeper_layers_learn_slower() -> None:
    found = rules(layer_decay=0.5)
    # Of 3 blocks and 5 levels: embeddings 0, blocks 1 to 3, above them 4; the rate is 0.5 ** (4 - level).
    levels = {"wte": 0, "wpe": 0, "h.0": 1, "h.1": 2, "h.2": 3, "ln_f": 4}
    for name, rule in found.items():
        part = next(part for part in levels if name.startswith(f"{part}."))
        assert rule.rate == 0.5 ** (4 - levels[part]), name


def test_a_pattern_that_matches_nothing_suggests_near_names() -> None:
    with pytest.raises(
        TextmillError,
        match=r"train\.freeze: 'h\.0\.mlp\.c_fcc' matches no weight of this model; the nearest are .*c_fc",
    ):
        rules(freeze=["h.0.mlp.c_fcc"])


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(TextmillError, match=r"train\.freeze: matches every weight"):
        rules(freeze=["*"])
