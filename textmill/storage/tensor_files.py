"""Read and write safetensors files; every size and offset in a header is checked before use."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from textmill.errors import TextmillError
from textmill.storage.files import hash_file, hash_json, read_json

Named = tuple[str, NDArray[np.float32]]
"""A weight or optimizer moment: checkpoint name and values in checkpoint layout, without vocabulary padding."""

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
NUMPY_DTYPES: dict[str, Any] = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
Precision = Literal["fp32", "bf16", "fp16"]
SAFETENSORS_DTYPES: dict[Precision, str] = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
SHARD_INDEX = "model.safetensors.index.json"


def encode_safetensors(named: list[Named], precision: Precision = "fp32") -> Iterator[bytes]:
    """The bytes of a safetensors file in one precision: the header, then every array in order."""
    dtype = SAFETENSORS_DTYPES[precision]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in named:
        start = end
        end = end + values.size * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name, values in named:
        yield _encode_array(name, np.ascontiguousarray(values, "<f4"), precision)


def _encode_array(name: str, values: NDArray[np.float32], precision: Precision) -> bytes:
    """Round to the nearest value of a precision, ties to even."""
    if precision == "fp32":
        return values.tobytes()
    if precision == "fp16":
        with np.errstate(over="ignore"):
            halves = values.astype("<f2")
        if np.isinf(halves).any():
            raise TextmillError(
                f"'{name}' holds {np.abs(values).max():.4g}, more than fp16 can represent; use bf16 or fp32"
            )
        return halves.tobytes()
    bits = values.view(np.uint32)
    rounded = np.where(np.isnan(values), bits | 0x400000, bits + 0x7FFF + ((bits >> 16) & 1))
    return (rounded >> 16).astype("<u2").tobytes()


def read_tensors(path: Path) -> Iterator[Named]:
    """Every floating-point array of a safetensors file as fp32; fp32 arrays are memory-mapped, not copied."""
    data, begin, entries = _read_header(path)
    for (start, _), name, dtype, shape in entries:
        if (values := _decode_array(data, begin + start, math.prod(shape), dtype)) is not None:
            yield name, values.reshape(shape)


def _read_header(path: Path) -> tuple[mmap.mmap, int, list[tuple[tuple[int, ...], str, str, tuple[int, ...]]]]:
    """The mapped file, where its arrays begin, and (start and end, name, dtype, shape) of each, all checked."""
    try:
        with safe_open(path, "numpy"):  # checks the header, and every size and offset in it
            pass
        with open(path, "rb") as stream:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, SafetensorError) as error:
        reason = str(error).partition(", expected one of")[0]
        raise TextmillError(f"{path}: not readable as safetensors ({reason}); it is missing or damaged") from None
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    entries = sorted(
        (tuple(one["data_offsets"]), name, one["dtype"], tuple(one["shape"])) for name, one in header.items()
    )
    for _, name, dtype, _ in entries:
        if dtype not in ITEM_BYTES:
            raise TextmillError(f"{path}: '{name}' is {dtype}, which textmill does not read; convert it to BF16")
    return data, 8 + length, entries


def _decode_array(data: mmap.mmap, offset: int, count: int, dtype: str) -> NDArray[np.float32] | None:
    if dtype == "BF16":
        halves = np.frombuffer(data, "<u2", count, offset)
        return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype not in NUMPY_DTYPES:
        return None
    return np.frombuffer(data, NUMPY_DTYPES[dtype], count, offset).astype(np.float32, copy=False)


def read_model(folder: Path) -> Iterator[Named]:
    """The weights of a model folder, in one safetensors file or in Hugging Face shards."""
    for path in _model_files(folder):
        yield from read_tensors(path)


def read_model_names(folder: Path) -> list[str]:
    """The names of the weights of a model folder, from its headers only."""
    return [name for path in _model_files(folder) for _, name, _, _ in _read_header(path)[2]]


def count_model(folder: Path) -> int:
    """The numbers in all weights of a model folder, from its headers only."""
    return sum(math.prod(shape) for path in _model_files(folder) for _, _, _, shape in _read_header(path)[2])


def _model_files(folder: Path) -> list[Path]:
    shards = folder / SHARD_INDEX
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if shards.is_file():
        return [folder / name for name in _shards_in(shards)]
    pickles = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt"))
    found = f"found {', '.join(pickles[:3])}, which can run code when opened" if pickles else "no other weights either"
    raise TextmillError(f"{folder}: no model.safetensors found, {found}; save the model as safetensors")


def _shards_in(path: Path) -> list[str]:
    """The shard files that an index lists."""
    tree = read_json(path)
    names = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise TextmillError(f"{path}: has no weight_map from weights to files; save the model as safetensors again")
    for name in names.values():
        if Path(name).name != name:
            raise TextmillError(f"{path}: lists the file '{name}', which is outside the folder")
    return sorted(set(names.values()))


def fingerprint_weights(folder: Path) -> str:
    """A hash of the full content of a model folder's weight files."""
    files = sorted(folder.glob("*.safetensors"))
    return hash_json({path.name: hash_file(path) for path in files if not path.name.startswith("optimizer")})
