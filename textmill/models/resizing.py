"""Resize the weights of a net to another vocabulary, or to more or fewer positions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from textmill.models import Shape, open_family, weights_of
from textmill.storage.tensor_files import Named

Array = NDArray[np.float32]


def resize_weights(
    weights: Iterable[Named], shape: Shape, kept: Mapping[int, int] | None, new: Mapping[int, Sequence[int]]
) -> Iterator[Named]:
    """The weights of a net of this shape.

    `kept` maps the id of each token that existed before to its old id (None: ids do not change); `new` maps each new
    token to the old ids whose mean vector it starts from.
    """
    wanted = {weight.name: weight for weight in weights_of(shape)}
    for name, values in open_family(shape.family).known_weights(weights):
        weight = wanted.get(name)
        if weight is not None and weight.by_token and (new or kept is not None):
            yield name, _by_token(values, shape.vocab, kept, new)
        elif weight is not None and weight.by_position and len(values) != shape.positions:
            yield name, resize_positions(values, shape.positions)
        else:
            yield name, values


def _by_token(values: Array, vocab: int, kept: Mapping[int, int] | None, new: Mapping[int, Sequence[int]]) -> Array:
    """A vector for every token; an unused id gets the mean of all vectors."""
    found = np.tile(values.mean(axis=0, dtype=np.float64).astype(np.float32), (vocab, 1))
    if kept is None:
        found[: len(values)] = values
    else:
        found[list(kept)] = values[list(kept.values())]
    for id_, parts in new.items():
        found[id_] = values[list(parts)].mean(axis=0, dtype=np.float64)
    return found


def resize_positions(values: Array, positions: int) -> Array:
    """Vectors for `positions` positions: the first ones, or linear interpolation if there are more than before."""
    if positions <= len(values):
        return values[:positions]
    points = np.linspace(0, len(values) - 1, positions)
    below = np.minimum(points.astype(np.int64), max(0, len(values) - 2))
    fraction = (points - below)[:, None]
    above = np.minimum(below + 1, len(values) - 1)
    found: Array = (values[below] * (1 - fraction) + values[above] * fraction).astype(np.float32)
    return found
