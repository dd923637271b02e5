"""Resize the weights of a net: another vocabulary, more or fewer positions, some of its blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.models import Shape, known_weights
from textmill.models.weights import sample_weights
from textmill.storage.tensor_files import Named

Array = NDArray[np.float32]


def resize_weights(
    weights: Iterable[Named], shape: Shape, kept: Mapping[int, int] | None, new: Mapping[int, Sequence[int]]
) -> Iterator[Named]:
    """The weights of a net of this shape.

    `kept` maps the id of each token that existed before to its old id (None: ids do not change); `new` maps each new
    token to the old ids whose mean vector it starts from.
    """
    weight_by_name = {weight.name: weight for weight in shape.weights()}
    for name, values in known_weights(shape, weights):
        weight = weight_by_name.get(name)
        if weight is not None and weight.by_token and (new or kept is not None):
            yield name, _by_token(values, shape.vocab, kept, new)
        elif weight is not None and weight.by_position and len(values) != shape.positions:
            yield name, resize_positions(values, shape.positions)
        else:
            yield name, values


def replace_heads(weights: Iterable[Named], shape: Shape, seed: int) -> Iterator[Named]:
    """The weights of a net of this shape, from a file that may have other heads.

    Weights of heads that are not in the file, or have another size there, start from their initial values."""
    missing = {weight.name: weight for weight in shape.weights()}
    for name, values in known_weights(shape, weights):
        weight = missing.get(name)
        if weight is None or (weight.head and weight.shape != values.shape):
            continue  # of another head
        del missing[name]
        yield name, values
    yield from sample_weights([weight for weight in missing.values() if weight.head], seed)


def select_layers(shape: Shape, layers: Sequence[int]) -> Shape:
    """The shape of a net with these blocks of a net of `shape`."""
    if missing := [layer for layer in layers if not 0 <= layer < shape.layers]:
        raise TextmillError(
            f"model.init_layers: names block {missing[0]}, the blocks of model.init_from are 0 to {shape.layers - 1}"
        )
    return replace(shape, layers=len(layers))


def select_layer_weights(weights: Iterable[Named], shape: Shape, layers: Sequence[int]) -> Iterator[Named]:
    """The weights of these blocks of a net of `shape` under their new names, and all weights outside blocks."""
    before = _names_by_depth(shape)
    after = _names_by_depth(replace(shape, layers=len(layers)))
    new_names: dict[str, list[str]] = {name: [name] for name in before[0] + before[shape.layers + 1]}
    for place, layer in enumerate(layers):
        for name, new_name in zip(before[shape.layers - layer], after[len(layers) - place], strict=True):
            new_names.setdefault(name, []).append(new_name)
    for name, values in known_weights(shape, weights):
        for new_name in new_names.get(name, ()):
            yield new_name, values


def _names_by_depth(shape: Shape) -> dict[int, list[str]]:
    """The names of weights by their distance from the output, in the order of the family."""
    names: dict[int, list[str]] = {depth: [] for depth in range(shape.layers + 2)}
    for weight in shape.weights():
        names[weight.depth].append(weight.name)
    return names


def _by_token(values: Array, vocab: int, kept: Mapping[int, int] | None, new: Mapping[int, Sequence[int]]) -> Array:
    """A vector for every token; an unused id gets the mean of all vectors."""
    mean = values.mean(axis=0, dtype=np.float64).astype(np.float32)
    resized = np.tile(mean, (vocab, *[1] * (values.ndim - 1)))
    if kept is None:
        resized[: len(values)] = values
    else:
        resized[list(kept)] = values[list(kept.values())]
    for id_, old_ids in new.items():
        resized[id_] = values[list(old_ids)].mean(axis=0, dtype=np.float64)
    return resized


def resize_positions(values: Array, positions: int) -> Array:
    """Vectors for `positions` positions: the first ones, or linear interpolation if there are more than before."""
    if positions <= len(values):
        return values[:positions]
    points = np.linspace(0, len(values) - 1, positions)
    below = np.minimum(points.astype(np.int64), max(0, len(values) - 2))
    fraction = (points - below)[:, None]
    above = np.minimum(below + 1, len(values) - 1)
    interpolated: Array = (values[below] * (1 - fraction) + values[above] * fraction).astype(np.float32)
    return interpolated
