"""Files of torch.save, read as plain arrays without running the code that they name."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from textmill.errors import TextmillError
from textmill.storage.tensor_files import Named

Tree = dict[str, Any]


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


ALLOWED = {("collections", "OrderedDict"), ("torch", "Size"), ("torch._utils", "_rebuild_tensor_v2")}


class Placeholder:
    """Takes the place of a class or function that must not be called."""

    def __new__(cls, *_: Any, **__: Any) -> Placeholder:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = _nothing


def _rebuild_plain(rebuild: Any, _: Any, arguments: Any, __: Any) -> Any:
    """A tensor with attributes: the tensor without them."""
    return rebuild(*arguments)


def _parameter(data: Any, *_: Any) -> Any:
    """A parameter: its values."""
    return data


class PlainNamespace:
    """Takes the place of argparse.Namespace, in which Megatron saves its arguments."""


REPLACED = {
    ("argparse", "Namespace"): PlainNamespace,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_plain,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
}
"""Functions of torch that rebuild subclasses of tensors, replaced by ones that return the plain tensor."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The object that a name in the file is resolved to."""
        if (module, name) in REPLACED:
            return REPLACED[module, name]
        if (module, name) in ALLOWED:
            return super().find_class(module, name)
        known = getattr(torch, name, None) if module == "torch" else None
        return known if isinstance(known, torch.dtype) else Placeholder


def _load(file: Any, **options: Any) -> Any:
    return _Unpickler(file, **options).load()


def read_pickle(path: Path) -> Any:
    """The content of a file of torch.save."""
    try:
        if zipfile.is_zipfile(path) and any(
            name.endswith("/constants.pkl") for name in zipfile.ZipFile(path).namelist()
        ):
            raise TextmillError(f"{path}: holds a compiled program; only saved tensors are read")
        module = SimpleNamespace(__name__="textmill.conversion.torch_files", Unpickler=_Unpickler, load=_load)
        return torch.load(path, map_location="cpu", pickle_module=module, weights_only=False)
    except TextmillError:
        raise
    except Exception as error:
        raise TextmillError(
            f"{path}: not a file of torch.save that can be read ({type(error).__name__}: {error})"
        ) from None
