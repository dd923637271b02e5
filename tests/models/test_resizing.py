"""Resized weights: interpolated positions, new tokens as means of old ones, everything else unchanged."""

from __future__ import annotations

import numpy as np
import pytest

from textmill.config import ModelConfig, ShapeConfig
from textmill.models import initial_weights, open_family
from textmill.models.resizing import resize_positions, resize_weights


@pytest.mark.parametrize(("before", "after"), [(8, 16), (5, 64), (1, 3), (2, 3), (33, 34), (64, 64), (64, 7)])
def test_positions_are_interpolated_or_truncated(before: int, after: int) -> None:
    values = np.random.default_rng(before).standard_normal((before, 6)).astype(np.float32)
    found = resize_positions(values, after)
    assert found.shape == (after, 6)
    if after <= before:
        assert np.array_equal(found, values[:after])
        return
    places = np.linspace(0, before - 1, after)
    for channel in range(6):
        assert np.allclose(
            found[:, channel], np.interp(places, np.arange(before), values[:, channel]), rtol=0, atol=1e-6
        )
    assert np.array_equal(found[[0, -1]], values[[0, -1]]), "both ends stay"


def test_token_vectors_are_kept_moved_or_averaged() -> None:
    family = open_family("gpt2")
    small = family.shape_of(ModelConfig(size="nano", shape=ShapeConfig(positions=8)), vocab=6, eos_id=0)
    large = family.shape_of(ModelConfig(size="nano", shape=ShapeConfig(positions=12)), vocab=9, eos_id=0)
    weights = dict(initial_weights(small, 1))
    wte = weights["transformer.wte.weight"]
    grown = dict(resize_weights(weights.items(), large, None, {6: [1], 8: [2, 3]}))["transformer.wte.weight"]
    assert np.array_equal(grown[:6], wte)
    assert np.array_equal(grown[6], wte[1])
    assert np.allclose(grown[8], (wte[2] + wte[3]) / 2, atol=1e-8)
    moved = dict(resize_weights(weights.items(), large, {0: 5, 7: 0}, {1: [0, 1, 2]}))
    assert np.array_equal(moved["transformer.wte.weight"][[0, 7]], wte[[5, 0]])
    assert np.allclose(moved["transformer.wte.weight"][1], wte[:3].mean(0), atol=1e-8)
    assert np.allclose(moved["transformer.wte.weight"][2], wte.mean(0), atol=1e-7), "an id that no token has"
    rest = weights.keys() - {"transformer.wte.weight", "transformer.wpe.weight"}
    assert all(moved[name] is weights[name] for name in rest)
    assert {name: values.shape for name, values in moved.items()} == {one.name: one.shape for one in large.weights()}


def test_a_head_bias_is_resized_like_the_embedding() -> None:
    family = open_family("bert")
    shapes = [family.shape_of(ModelConfig(family="bert", size="tiny"), vocab=vocab, eos_id=0) for vocab in (6, 9)]
    weights = {
        name: np.arange(values.size, dtype=np.float32).reshape(values.shape)
        for name, values in initial_weights(shapes[0], 1)
    }
    found = dict(resize_weights(weights.items(), shapes[1], {0: 5, 7: 0}, {1: [0, 1]}))["cls.predictions.bias"]
    assert found.tolist() == [5.0, 0.5, 2.5, 2.5, 2.5, 2.5, 2.5, 0.0, 2.5]
