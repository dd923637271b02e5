"""Files of torch.save: written whole, and read as plain arrays without running the code that they name."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from textmill.conversion.safe_unpickle import read_pickle
from textmill.errors import TextmillError
from textmill.storage.files import write_bytes
from textmill.storage.tensor_files import Named

Tree = dict[str, Any]
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def write_torch_file(path: Path, tree: Any) -> dict[str, Any]:
    """Write a file of torch.save atomically; tensors, plain values and a Namespace only."""
    stream = io.BytesIO()
    torch.save(tree, stream)
    return write_bytes(path, [stream.getbuffer()])


def to_tensor(values: Any, precision: str) -> Tensor:
    """A contiguous tensor in a precision, with a storage of its own."""
    return torch.from_numpy(np.array(values, np.float32)).to(TORCH_DTYPES[precision])


def to_array(value: Tensor) -> Any:
    """The values of a tensor as contiguous fp32."""
    return np.ascontiguousarray(value.detach().to(torch.float32).numpy())


def read_tree(path: Path) -> Tree:
    """The dict in a file of torch.save."""
    tree = read_pickle(path)
    if not isinstance(tree, dict):
        raise TextmillError(f"{path}: holds a {type(tree).__name__}; a checkpoint holds a dict")
    return tree


def read_tensor_tree(path: Path) -> Iterator[Named]:
    """Every floating-point tensor of a flat state dict."""
    yield from named_tensors(read_tree(path))


def named_tensors(tree: Tree) -> Iterator[Named]:
    """The floating-point tensors of a state dict."""
    for name, value in tree.items():
        if isinstance(name, str) and isinstance(value, Tensor) and value.is_floating_point():
            yield name, to_array(value)
