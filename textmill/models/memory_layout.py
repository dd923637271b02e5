"""Weights from checkpoint layout to memory layout, with checks that names and sizes fit the net."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.models import Shape, Weight, known_weights, to_memory
from textmill.storage.tensor_files import Named


def lay_out_weights(
    weights: Iterable[Weight], shape: Shape, named: Iterable[Named], where: str
) -> Iterator[tuple[Weight, NDArray[np.float32]]]:
    """Each weight of a net exactly once, in memory layout; `where` names the source in errors."""
    missing = {weight.name: weight for weight in weights}
    for name, values in known_weights(shape, named):
        if name not in missing:
            raise TextmillError(f"{where}: has '{name}', which this model does not have")
        weight = missing.pop(name)
        yield weight, lay_out_weight(weight, values, where)
    if missing:
        raise TextmillError(f"{where}: lacks {len(missing)} weights, such as '{next(iter(missing))}'")


def lay_out_weight(weight: Weight, values: NDArray[np.float32], where: str) -> NDArray[np.float32]:
    """Values from checkpoint layout to the net's memory layout."""
    if values.shape != weight.shape:
        raise TextmillError(f"{where}: '{weight.name}' is {list(values.shape)}; this model's is {list(weight.shape)}")
    return np.ascontiguousarray(to_memory(weight, values.astype(np.float32, copy=False)))
