"""Named arrays in safetensors files: written byte by byte, read with every claim of the header checked."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from operator import index
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.storage.files import hash_file, hash_json, read_json

Named = tuple[str, NDArray[np.float32]]
"""A weight or moment: its checkpoint name and its values in checkpoint layout, with the real vocabulary."""

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
READ_AS: dict[str, Any] = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
Precision = Literal["fp32", "bf16", "fp16"]
WRITTEN_AS: dict[Precision, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
LONGEST_HEADER = 100_000_000
INDEX = "model.safetensors.index.json"


def blocks_of(named: list[Named], precision: Precision = "fp32") -> Iterator[bytes]:
    """The bytes of a safetensors file of arrays in one precision: header, then every array in order."""
    dtype = WRITTEN_AS[precision]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in named:
        start, end = end, end + values.size * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name, values in named:
        yield _bytes_of(name, np.ascontiguousarray(values, "<f4"), precision)


def _bytes_of(name: str, values: NDArray[np.float32], precision: Precision) -> bytes:
    """Values rounded to the nearest of a precision, ties to even."""
    if precision == "fp32":
        return values.tobytes()
    if precision == "fp16":
        with np.errstate(over="ignore"):
            halves = values.astype("<f2")
        if np.isinf(halves).any():
            raise TextmillError(f"'{name}' holds {np.abs(values).max():.4g}, more than fp16 can say; take bf16 or fp32")
        return halves.tobytes()
    bits = values.view(np.uint32)
    rounded = np.where(np.isnan(values), bits | 0x400000, bits + 0x7FFF + ((bits >> 16) & 1))
    return (rounded >> 16).astype("<u2").tobytes()


def read_tensors(path: Path) -> Iterator[Named]:
    """Every floating-point array of a safetensors file as fp32, mapped where it can be."""
    try:
        with open(path, "rb") as stream:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise TextmillError(f"{path}: not readable ({error})") from None
    length = int.from_bytes(data[:8], "little")
    if length > min(LONGEST_HEADER, len(data) - 8):
        raise TextmillError(
            f"{path}: its header claims {length:,} bytes of a file of {len(data):,}; the file is cut or not safetensors"
        )
    try:
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        claims = sorted(
            (_whole(one["data_offsets"]), name, one["dtype"], _whole(one["shape"])) for name, one in header.items()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TextmillError(f"{path}: its header is not that of a safetensors file") from None
    position = 0
    for (start, end), name, dtype, shape in claims:
        wanted = math.prod(shape) * ITEM_BYTES.get(dtype, -1)
        if start != position or end - start != wanted or min(shape, default=0) < 0 or 8 + length + end > len(data):
            claim = f"'{name}' ({dtype} {list(shape)}) claims bytes {start:,} to {end:,}"
            raise TextmillError(f"{path}: {claim}, which do not fit; the file is damaged")
        position = end
    for (start, _), name, dtype, shape in claims:
        if (values := _values(data, 8 + length + start, math.prod(shape), dtype)) is not None:
            yield name, values.reshape(shape)


def _whole(numbers: list[int]) -> tuple[int, ...]:
    """Numbers that a header claims, each of them whole."""
    return tuple(index(number) for number in numbers)


def _values(data: mmap.mmap, offset: int, count: int, dtype: str) -> NDArray[np.float32] | None:
    if dtype == "BF16":
        halves = np.frombuffer(data, "<u2", count, offset)
        return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype not in READ_AS:
        return None
    return np.frombuffer(data, READ_AS[dtype], count, offset).astype(np.float32, copy=False)


def read_model(folder: Path) -> Iterator[Named]:
    """The weights of a model folder, in one safetensors file or in Hugging Face shards."""
    shards = folder / INDEX
    if (folder / "model.safetensors").is_file():
        yield from read_tensors(folder / "model.safetensors")
    elif shards.is_file():
        for name in _shards_in(shards):
            yield from read_tensors(folder / name)
    else:
        pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt"))
        found = f"found {', '.join(pickles[:3])}, which can run code when opened" if pickles else "found none"
        raise TextmillError(f"{folder}: no model.safetensors there, {found}; save the model as safetensors")


def _shards_in(path: Path) -> list[str]:
    """The files that an index names."""
    tree = read_json(path)
    names = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise TextmillError(f"{path}: has no weight_map from weights to files; save the model as safetensors again")
    for name in names.values():
        if Path(name).name != name:
            raise TextmillError(f"{path}: names the file '{name}', which leaves the folder")
    return sorted(set(names.values()))


def fingerprint_of(folder: Path) -> str:
    """A hash of a model folder's weights: their files' whole content."""
    files = sorted(folder.glob("*.safetensors"))
    return hash_json({path.name: hash_file(path) for path in files if not path.name.startswith("optimizer")})
