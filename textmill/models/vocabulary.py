"""A vocabulary that grows: new tokens get vectors, each the mean of the pieces that its text was made of before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from textmill.models import open_family
from textmill.tensors import Named


def grow(weights: Iterable[Named], shape: Any, pieces: Mapping[int, Sequence[int]]) -> Iterator[Named]:
    """The weights of a net with rows for new tokens; `shape` is the grown one, `pieces` has the old ids of each new id."""
    family = open_family(shape.family)
    by_token = {weight.name for weight in family.weights_of(shape) if weight.layout == "vocab"}
    for name, values in family.known_weights(weights):
        if name not in by_token or not pieces:
            yield name, values
            continue
        grown = np.zeros((shape.vocab, *values.shape[1:]), np.float32)
        grown[: len(values)] = values
        for id_, parts in pieces.items():
            grown[id_] = values[list(parts)].mean(axis=0, dtype=np.float64)
        yield name, grown
