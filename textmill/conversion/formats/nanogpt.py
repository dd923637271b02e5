"""nanoGPT's ckpt.pt: model_args, and weights under GPT-2's names with matrices as outputs x inputs; read only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from textmill.conversion.model import Hints, Model, check_layers, collect_weights
from textmill.conversion.torch_files import Tree, named_tensors, read_tree
from textmill.errors import TextmillError
from textmill.models import open_family
from textmill.storage.tensor_files import Named

PRECISIONS: tuple[str, ...] = ()
FILE = "ckpt.pt"
NUMBERS = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
COMPILED = "_orig_mod."
"""What torch.compile puts before every name."""
EPSILON = 1e-5


def matches(path: Path) -> bool:
    """A file ckpt.pt, or a folder with one."""
    return (path / FILE).is_file() if path.is_dir() else path.name.startswith("ckpt") and path.suffix == ".pt"


def read(path: Path, hints: Hints) -> Model:
    """Read a ckpt.pt; weights without biases get biases of zero."""
    path = path / FILE if path.is_dir() else path
    tree = read_tree(path)
    args = tree.get("model_args")
    state = tree.get("model")
    if not isinstance(args, dict) or not isinstance(state, dict):
        raise TextmillError(f"{path}: has no model_args and model; it is not a checkpoint of nanoGPT")
    shape = _shape_of(args, hints, path)
    check_layers(shape, len(state), str(path))
    weights = collect_weights(shape, _named(state, shape), str(path), padded=hints.vocab is not None)
    return Model(shape, weights, hints.open_tokenizer(path.parent))


def _shape_of(args: Tree, hints: Hints, path: Path) -> Any:
    hf = {key.replace("block_size", "n_positions"): args.get(key) for key in NUMBERS}
    hf |= {"vocab_size": hints.vocab or args.get("vocab_size"), "activation_function": hints.activation or "gelu"}
    dropout = args.get("dropout", 0.0)
    hf |= {"embd_pdrop": dropout, "attn_pdrop": dropout, "resid_pdrop": dropout, "layer_norm_epsilon": EPSILON}
    return open_family("gpt2").shape_of_hf(hf, str(path))


def _named(state: Tree, shape: Any) -> Iterator[Named]:
    weights = {weight.name: weight for weight in shape.weights()}
    found = {name.removeprefix(COMPILED): values for name, values in named_tensors(state)}
    for name, values in found.items():
        is_turned = name in weights and weights[name].transposed and values.ndim == 2
        yield name, values.T if is_turned else values
    for name in weights.keys() - found.keys():  # model_args has bias=False
        if name.endswith(".bias"):
            yield name, np.zeros(weights[name].shape, np.float32)
