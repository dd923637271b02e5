"""Model: a model without a file format, as a format's writer takes it and its reader returns it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.models import Shape, known_weights
from textmill.models.pooling import Pooling
from textmill.storage.files import write_text
from textmill.storage.tensor_files import Named
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

Array = NDArray[np.float32]
PLAUSIBLE_LAYERS = 1000
"""Up to so many layers, the missing weights are named."""
Files = dict[str, dict[str, Any]]
"""Written files by name: length and SHA-256, as a manifest stores them."""


@dataclass(frozen=True)
class Model:
    """A shape, all weights under the family's names, and the tokenizer if there is one."""

    shape: Any
    weights: dict[str, Array]
    tokenizer: TextTokenizer | None = None
    card: str | None = None
    """The text of the model card, if the source says something about the model."""
    licences: dict[str, str] = field(default_factory=dict)
    """Texts of licences that came with it, by file name."""
    pooling: Pooling | None = None
    """How its embeddings are computed, if the source says so."""


@dataclass(frozen=True)
class Hints:
    """What the user says about a file that does not say it itself."""

    config: Path | None = None
    """A Hugging Face config.json."""
    tokenizer: Path | None = None
    """The folder of the tokenizer."""
    vocab: int | None = None
    """The vocabulary size without padding rows."""
    heads: int | None = None
    """Attention heads."""
    activation: str | None = None
    """The activation of the MLP."""

    def open_tokenizer(self, folder: Path) -> TextTokenizer | None:
        """The tokenizer that the user names, else the one in the folder of the model, if there is one."""
        where = self.tokenizer or (folder if (folder / "tokenizer.json").is_file() else None)
        return open_tokenizer(where) if where else None


def collect_weights(shape: Shape, named: Iterable[Named], where: str, *, padded: bool = False) -> dict[str, Array]:
    """All weights of a shape from a file's own, checked for names and sizes; `padded`: rows of the vocabulary beyond
    the shape's are dropped."""
    weights: dict[str, Array] = {}
    held = list(named)
    check_layers(shape, len(held), where)
    expected = {weight.name: weight for weight in shape.weights()}
    for name, values in known_weights(shape, held):
        weight = expected.get(name)
        if weight is None:
            raise TextmillError(f"{where}: has '{name}', which a {shape.family} of this shape does not have")
        if padded and weight.by_token and values.ndim == 2 and len(values) > weight.shape[0]:
            values = values[: weight.shape[0]]
        if values.shape != weight.shape:
            raise TextmillError(
                f"{where}: '{name}' is {list(values.shape)} where the config says {list(weight.shape)}; "
                "the config and the weights disagree"
            )
        weights[name] = values
    if missing := [name for name in expected if name not in weights]:
        raise TextmillError(f"{where}: lacks {len(missing)} weights, such as '{missing[0]}'")
    return {name: weights[name] for name in expected}


def check_layers(shape: Shape, tensors: int, where: str) -> None:
    """Refuse a shape with many more layers than a file has tensors, before the list of its weights is built."""
    if shape.layers > max(tensors, PLAUSIBLE_LAYERS):
        raise TextmillError(
            f"{where}: describes {shape.layers:,} layers and has {tensors:,} weights; "
            "the config and the weights disagree"
        )


def write_texts(folder: Path, texts: dict[str, str]) -> Files:
    """Write small files by name."""
    return {name: write_text(folder / name, text) for name, text in texts.items()}


def require_family(shape: Shape, kind: str, *families: str) -> None:
    """Refuse a family that a format has no place for."""
    if shape.family not in families:
        raise TextmillError(
            f"export.kind: {kind} can hold a {' or '.join(families)}, the model is a {shape.family}; use hf, or train "
            f"another model with model.family={families[0]}"
        )
