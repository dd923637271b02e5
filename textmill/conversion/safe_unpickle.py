"""Files of torch.save, read without running anything they name: tensors and plain values come out, all else stays a blank.

A pickle says which functions to call on what. Here only those that put a tensor together are called; every other name becomes `Left`,
which takes whatever it is given and does nothing.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from textmill.errors import TextmillError

KNOWN = {("collections", "OrderedDict"), ("torch", "Size"), ("torch._utils", "_rebuild_tensor_v2")}


class Left:
    """Stands where a file names a class or function that is none of ours to call."""

    def __new__(cls, *_: Any, **__: Any) -> Left:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = _nothing


def _typed(make: Any, _: Any, given: Any, __: Any) -> Any:
    """A tensor that bore attributes: the tensor, without them."""
    return make(*given)


def _parameter(data: Any, *_: Any) -> Any:
    """A parameter: its values."""
    return data


PLAIN = {
    ("torch._tensor", "_rebuild_from_type_v2"): _typed,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
}
"""What torch makes richer things with, in a form that makes plain ones."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """What a name in the file stands for."""
        if (module, name) in PLAIN:
            return PLAIN[module, name]
        if (module, name) in KNOWN:
            return super().find_class(module, name)
        known = getattr(torch, name, None) if module == "torch" else None
        return known if isinstance(known, torch.dtype) else Left


def _load(file: Any, **options: Any) -> Any:
    return _Unpickler(file, **options).load()


def read_pickle(path: Path) -> Any:
    """All that a file of torch.save holds."""
    try:
        if zipfile.is_zipfile(path) and any(
            name.endswith("/constants.pkl") for name in zipfile.ZipFile(path).namelist()
        ):
            raise TextmillError(f"{path}: holds a compiled program; only saved tensors are read")
        module = SimpleNamespace(__name__="textmill.conversion.safe_unpickle", Unpickler=_Unpickler, load=_load)
        return torch.load(path, map_location="cpu", pickle_module=module, weights_only=False)
    except TextmillError:
        raise
    except Exception as error:
        raise TextmillError(
            f"{path}: not a file of torch.save that can be read ({type(error).__name__}: {error})"
        ) from None
