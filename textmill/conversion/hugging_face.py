"""A model as transformers opens it: config.json, the tokenizer's files, and the weights under their names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from textmill.checkpoints.folders import Checkpoint
from textmill.errors import TextmillError
from textmill.models import open_family
from textmill.storage.tensor_files import Named
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The names of precisions in a config.json."""


def text_files(shape: Any, tokenizer: TextTokenizer, precision: str) -> dict[str, str]:
    """Every file except the weights; the chat template is in the tokenizer's files."""
    hf = {**open_family(shape.family).hf_config_of(shape), "dtype": DTYPES[precision]}
    return {"config.json": json.dumps(hf, indent=2) + "\n", **tokenizer.files(shape.positions)}


def read_all_weights(checkpoint: Checkpoint, shape: Any) -> Iterator[Named]:
    """Every weight of the model, under transformers' name and with the expected size; an adapter is merged into its
    base."""
    family = open_family(shape.family)
    missing = {weight.name: weight.shape for weight in family.weights_of(shape)}
    for name, values in family.known_weights(checkpoint.weights()):
        if missing.pop(name, None) != values.shape:
            raise TextmillError(
                f"{checkpoint.folder}: '{name}' is {list(values.shape)}; its config.json and its weights disagree"
            )
        yield name, values
    if missing:
        raise TextmillError(f"{checkpoint.folder}: lacks {len(missing)} weights, such as '{next(iter(missing))}'")
