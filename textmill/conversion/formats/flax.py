"""Flax checkpoints: flax_model.msgpack of transformers, and checkpoint_N of a training state; read only.

The format is msgpack with an extension type for arrays; flax itself needs more packages than a reader does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import SIZES
from textmill.conversion.formats.hf import read_hf_shape
from textmill.conversion.model import Array, Hints, Model, collect_weights
from textmill.errors import TextmillError
from textmill.storage.tensor_files import Named

PRECISIONS: tuple[str, ...] = ()
FILE = "flax_model.msgpack"
STATE = re.compile(r"checkpoint_(\d+)")
ARRAY = 1
NUMBER = 3
"""Codes of flax's extension types; both hold a shape, the name of a dtype, and bytes."""
CHUNKED = "__msgpack_chunked_array__"
"""Marks an array above 1 GiB, which is written in parts."""
LAST = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
"""Flax's last names of parameters, and those of transformers."""


def matches(path: Path) -> bool:
    """A file of this name, or a folder with one and no weights of torch."""
    if path.is_dir():
        return _find_file(path) is not None and not any(path.glob("*.safetensors")) and not any(path.glob("*.bin"))
    return path.name == FILE or (path.is_file() and STATE.fullmatch(path.name) is not None)


def read(path: Path, hints: Hints) -> Model:
    """Read the parameters of a file, or of the newest in a folder."""
    file = _find_file(path) if path.is_dir() else path
    if file is None:
        raise TextmillError(f"{path}: has no {FILE} and no checkpoint_N; name a file")
    config = hints.config or file.parent / "config.json"
    if not config.exists():
        raise TextmillError(f"{file}: has no config.json next to it; import it with --config config.json")
    shape = read_hf_shape(config, *SIZES)
    tree = _read_msgpack(file)
    params = tree.get("params", tree)
    if not isinstance(params, dict):
        raise TextmillError(f"{file}: has no params; it is not a checkpoint of flax")
    try:
        named = list(_named(params, file))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise TextmillError(f"{file}: damaged: {type(error).__name__}: {error}") from None
    weights = collect_weights(shape, named, str(file), padded=hints.vocab is not None)
    return Model(shape, weights, hints.open_tokenizer(file.parent))


def _find_file(folder: Path) -> Path | None:
    if (folder / FILE).is_file():
        return folder / FILE
    found = {int(match[1]): path for path in folder.iterdir() if (match := STATE.fullmatch(path.name))}
    return found[max(found)] if found and found[max(found)].is_file() else None


def _read_msgpack(file: Path) -> dict[str, Any]:
    try:
        import msgpack
    except ImportError:
        raise TextmillError("reading flax needs msgpack; run: pip install 'textmill[export]'") from None
    try:
        tree = msgpack.unpackb(file.read_bytes(), ext_hook=_read_extension, raw=False, strict_map_key=False)
    except Exception as error:
        raise TextmillError(f"{file}: not a complete file of flax ({type(error).__name__}: {error})") from None
    if not isinstance(tree, dict):
        raise TextmillError(f"{file}: holds a {type(tree).__name__}; a checkpoint of flax holds a dict")
    return tree


def _read_extension(code: int, data: bytes) -> Any:
    import msgpack

    if code not in (ARRAY, NUMBER):
        return None
    shape, dtype, values = msgpack.unpackb(data, raw=False)
    if dtype == "bfloat16":  # the upper half of an fp32
        return (np.frombuffer(values, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return np.frombuffer(values, np.dtype(dtype)).reshape(shape)


def _named(tree: dict[str, Any], file: Path, prefix: str = "") -> Iterator[Named]:
    """The weights by transformers' names for torch; kernels are stored the other way round."""
    for name, value in tree.items():
        if isinstance(value, dict) and not value.get(CHUNKED):
            yield from _named(value, file, f"{prefix}{name}.")
            continue
        array = _join(value) if isinstance(value, dict) else value
        if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
            raise TextmillError(f"{file}: '{prefix}{name}' is no array of numbers; it is not a checkpoint of flax")
        values = array.astype(np.float32)
        yield prefix + LAST.get(name, name), np.ascontiguousarray(values.T if name == "kernel" else values)


def _join(parts: dict[str, Any]) -> Array:
    """An array that was written in parts."""
    shape = [parts["shape"][str(number)] for number in range(len(parts["shape"]))]
    chunks = [parts["chunks"][str(number)] for number in range(len(parts["chunks"]))]
    joined: Array = np.concatenate([chunk.ravel() for chunk in chunks]).reshape(shape)
    return joined
