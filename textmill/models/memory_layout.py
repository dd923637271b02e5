"""Weights on their way into memory: every one that a net has, each of its own shape, laid out as its family says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.models import Weight, open_family
from textmill.storage.tensor_files import Named


def laid_out(
    weights: Iterable[Weight], shape: Any, named: Iterable[Named], where: str
) -> Iterator[tuple[Weight, NDArray[np.float32]]]:
    """Each of a net's weights once, in memory's layout; `where` names them in errors."""
    missing = {weight.name: weight for weight in weights}
    for name, values in open_family(shape.family).known_weights(named):
        if name not in missing:
            raise TextmillError(f"{where}: holds '{name}', which this model does not have")
        weight = missing.pop(name)
        yield weight, in_memory(shape, weight, values, where)
    if missing:
        raise TextmillError(f"{where}: lacks {len(missing)} weights, '{next(iter(missing))}' among them")


def in_memory(shape: Any, weight: Weight, values: NDArray[np.float32], where: str) -> NDArray[np.float32]:
    """Values in checkpoint layout as the net holds them."""
    if values.shape != weight.shape:
        raise TextmillError(f"{where}: '{weight.name}' is {list(values.shape)}; this model's is {list(weight.shape)}")
    laid = open_family(shape.family).to_memory(weight, values.astype(np.float32, copy=False), shape)
    return np.ascontiguousarray(laid)
