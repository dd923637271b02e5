"""Given weights in a net of other sizes: vectors for another vocabulary, and for more positions or fewer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.models import open_family
from textmill.storage.tensor_files import Named

Array = NDArray[np.float32]


def resized(
    weights: Iterable[Named], shape: Any, kept: Mapping[int, int] | None, new: Mapping[int, Sequence[int]]
) -> Iterator[Named]:
    """The weights of a net of this shape.

    `kept` has the old id of each token that there was (none: every old one stands at its place); `new` the old ids of each that there
    was not, whose mean it starts from.
    """
    family = open_family(shape.family)
    wanted = {weight.name: weight for weight in family.weights_of(shape)}
    for name, values in family.known_weights(weights):
        weight = wanted.get(name)
        if weight is not None and weight.layout == "vocab" and (new or kept is not None):
            yield name, _by_token(values, shape.vocab, kept, new)
        elif weight is not None and weight.by_position and len(values) != shape.positions:
            yield name, stretched(values, shape.positions)
        else:
            yield name, values


def _by_token(values: Array, vocab: int, kept: Mapping[int, int] | None, new: Mapping[int, Sequence[int]]) -> Array:
    """A vector for every token; an id that no token has gets the mean of all."""
    found = np.tile(values.mean(axis=0, dtype=np.float64).astype(np.float32), (vocab, 1))
    if kept is None:
        found[: len(values)] = values
    else:
        found[list(kept)] = values[list(kept.values())]
    for id_, parts in new.items():
        found[id_] = values[list(parts)].mean(axis=0, dtype=np.float64)
    return found


def stretched(values: Array, positions: int) -> Array:
    """Vectors of so many positions: the first ones, or, where there are more than before, points on the lines between the old ones."""
    if positions <= len(values):
        return values[:positions]
    places = np.linspace(0, len(values) - 1, positions)
    below = np.minimum(places.astype(np.int64), max(0, len(values) - 2))
    share = (places - below)[:, None]
    above = np.minimum(below + 1, len(values) - 1)
    found: Array = (values[below] * (1 - share) + values[above] * share).astype(np.float32)
    return found
